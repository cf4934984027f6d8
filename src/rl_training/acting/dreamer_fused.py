"""DreamerV3's dynamics on a GPU, where small kernels take longer to start than to run: fewer of them between products.

All that a gradient step launches is in one captured graph, which paths.make_gradient makes. The first steps of a run
wait for the compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rl_training.acting.dreamer_path import StepsPath
from rl_training.models.dreamer import DreamerModel, Size
from rl_training.models.rssm import BLOCKS, GROUPS
from rl_training.ops.dreamer_steps import PLAIN, Steps

Example = tuple[str, tuple[Tensor, ...]]  # the name of a step, and arguments


def fused_path(
    model: DreamerModel, dtype: torch.dtype, rows: int, compile: Callable[..., Any] = torch.compile
) -> StepsPath:
    """The plain steps, each compiled to a kernel or two; as they are where this machine cannot compile them.

    rows: sequences in a batch.
    """
    path = StepsPath(model, dtype, Steps(*(compile(function) for function in PLAIN)))
    try:
        compare(path, examples(model.size, dtype, rows, model.bins.device))
    except Exception as error:  # of torch's compiler, of Triton, or of the C compiler that Triton needs
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"torch.compile does not work here ({cause}): dreamer trains without it, slower", stacklevel=2)
        return StepsPath(model, dtype, PLAIN)
    return path


@torch.no_grad()
def compare(path: StepsPath, given: list[Example]) -> None:
    """Raise an error where a result is not that of the plain step.

    The contexts are those of training: compiled code is for one context.
    """
    for name, arguments in given:
        forward = not name.startswith(("norm_silu_", "gru_", "mixed_backward"))
        with path.products() if forward else nullcontext():
            found = getattr(path.steps, name)(*arguments)
        expected = getattr(PLAIN, name)(*arguments)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, msg=name)


def examples(size: Size, dtype: torch.dtype, rows: int, device: torch.device) -> list[Example]:
    """Of all steps, in the shapes that they have along a sequence."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    block, stoch = size.deter // BLOCKS, GROUPS * size.classes
    norms = [((rows, size.hidden), (size.hidden,)), ((BLOCKS, rows, block), (BLOCKS, 1, block))]
    made: list[Example] = []
    for shape, gain_shape in norms:
        x, gain = normal(*shape).to(dtype), normal(*gain_shape)
        made += [("norm_silu", (x, gain)), ("norm_silu_backward", (x, gain, x)), ("norm_silu_gain", (x, gain, x))]
    gates, deter = normal(BLOCKS, rows, 3 * block).to(dtype), normal(rows, size.deter)
    noise = torch.rand(rows, GROUPS, generator=generator, device=device)
    logits = normal(rows, stoch).to(dtype)
    probs, _ = PLAIN.mixed_sample(logits, noise)
    return [
        *made,
        ("gru", (gates, deter)),
        ("gru_backward", (gates, deter, deter)),
        ("mixed_sample", (logits, noise)),
        ("mixed_backward", (probs, noise, normal(rows, stoch), normal(rows, stoch))),
    ]
