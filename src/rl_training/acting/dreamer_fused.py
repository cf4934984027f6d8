"""DreamerV3's dynamics on a GPU, where small kernels take longer to start than to run: fewer of them between products.

All that a gradient step launches is in one captured graph, which paths.make_gradient makes. The first steps of a run
wait for the compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from rl_training.acting.dreamer_path import StepsPath
from rl_training.models.dreamer import DreamerModel, Size
from rl_training.models.rssm import BLOCKS, GROUPS
from rl_training.ops.dreamer_steps import PLAIN, Steps

Example = tuple[str, tuple[Tensor, ...]]  # the name of a step, and arguments
MOST_OTHERS = 0.02  # share of samples that may differ
Compile = Callable[..., Any]  # torch.compile or, in tests, another one


class Compiler:
    """Compiles functions of tensors, until one cannot be compiled: those that follow run as they are."""

    def __init__(self, compile: Compile = torch.compile) -> None:
        self.compile, self.works = compile, True

    def __call__(self, function: Callable[..., Any]) -> Compiled:
        return Compiled(function, self)

    def fails(self, error: Exception) -> None:
        self.works = False
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"torch.compile does not work here ({cause}): dreamer trains without it, slower", stacklevel=2)


class Compiled:
    """A function that is compiled for each combination of shapes, strides and types by itself.

    Torch compiles a code object 8 times at most, and then runs it uncompiled. A model has more combinations, so each
    has a copy of the code.
    """

    def __init__(self, function: Callable[..., Any], compiler: Compiler) -> None:
        self.function, self.compiler = function, compiler
        self.made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) for x in tensors)
        made = self.made.get(key)
        return self.first(key, tensors) if made is None else made(*tensors)

    def first(self, key: Any, tensors: tuple[Tensor, ...]) -> Any:
        """The first call compiles."""
        self.made[key] = self.function
        if self.compiler.works:
            compiled = self.compiler.compile(own_code(self.function, len(self.made)), dynamic=False)
            try:
                output = compiled(*tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of torch's compiler, of Triton, or of the C compiler that Triton needs
                self.compiler.fails(error)
            else:
                self.made[key] = compiled
                return output
        return self.function(*tensors)


def own_code(function: Any, number: int) -> Any:
    """The function with a code object of its own."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def fused_path(model: DreamerModel, dtype: torch.dtype, rows: int, compile: Compile = torch.compile) -> StepsPath:
    """The plain steps, each compiled to a kernel or two; as they are where this machine cannot compile them.

    rows: sequences in a batch.
    """
    compiler = Compiler(compile)
    path = StepsPath(model, dtype, Steps(*map(compiler, PLAIN)))
    try:
        compare(path, examples(model.size, dtype, rows, model.bins.device))
    except AssertionError as error:
        compiler.fails(error)
    return path if compiler.works else StepsPath(model, dtype, PLAIN)


@torch.no_grad()
def compare(path: StepsPath, given: list[Example]) -> None:
    """Raise an AssertionError where a result is not that of the plain step.

    The contexts are those of training: compiled code is for one context.
    """
    for name, arguments in given:
        forward = not name.startswith(("norm_silu_", "gru_", "mixed_backward"))
        with path.products() if forward else nullcontext():
            found = getattr(path.steps, name)(*arguments)
        expected = getattr(PLAIN, name)(*arguments)
        if name == "mixed_sample":  # a number next to a boundary may be rounded to its other side
            (found, sample), (expected, plain) = found, expected
            others = (sample != plain).view(*arguments[1].shape, -1).any(-1)  # [rows, GROUPS]
            if others.float().mean() > MOST_OTHERS:
                raise AssertionError(name)
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
        x, d_out, gain = normal(*shape).to(dtype), normal(*shape).to(dtype), normal(*gain_shape)
        made += [("norm_silu", (x, gain))]
        made += [("norm_silu_backward", (x, gain, d_out)), ("norm_silu_gain", (x, gain, d_out))]
    gates, deter = normal(BLOCKS, rows, 3 * block).to(dtype), normal(rows, size.deter)
    noise = torch.rand(rows, GROUPS, generator=generator, device=device)
    logits = normal(rows, stoch).to(dtype)
    probs, _ = PLAIN.mixed_sample(logits, noise)
    return [
        *made,
        ("gru", (gates, deter)),
        ("gru_backward", (gates, deter, normal(rows, size.deter))),
        ("mixed_sample", (logits, noise)),
        ("mixed_backward", (probs, noise, normal(rows, stoch), normal(rows, stoch))),
    ]
