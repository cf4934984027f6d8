"""DreamerV3's training on a CPU: compiled loops between matrix products, which are in float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.acting.dreamer_imagination import Imagination, layers
from rl_training.acting.dreamer_path import StepsPath
from rl_training.models.dreamer import DreamerModel, Functions
from rl_training.models.rssm import BLOCKS, Latent
from rl_training.ops import dreamer_cells
from rl_training.ops import dreamer_kernels as kernels
from rl_training.ops.dreamer_cells import EPS, SHARE, array
from rl_training.ops.dreamer_steps import Steps, as_blocks


class CompiledPath(StepsPath):
    """Compiled loops between the matrix products, on a CPU.

    Only a gradient step has them: actors in other processes have the plain functions, which round differently.
    """

    def __init__(self, model: DreamerModel, dtype: torch.dtype = torch.float32) -> None:
        functions = Functions(dreamer_cells.normed_silu, dreamer_cells.two_hot_mean, dreamer_cells.two_hot_loss)
        super().__init__(model, dtype, dreamer_cells.STEPS, functions)

    def imagine(self, start: Latent, prior_noise: Tensor, action_noise: Tensor) -> tuple[Tensor, Tensor]:
        return CompiledImagination(self.model, self.steps, self.dtype)(start, prior_noise, action_noise)

    @contextmanager
    def settings(self) -> Iterator[None]:
        with super().settings(), nullcontext() if has_matrix_units() else OneDNN():
            yield


def has_matrix_units() -> bool:
    """Whether the processor has AMX, with which oneDNN does compute in bfloat16 where it may."""
    check: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # not public
    return check()


class OneDNN:
    """A context in which oneDNN computes products of float32 numbers, which MKL does half as fast on some processors.

    Torch gives them to it only if products may be of bfloat16: only for processors that do not use this.
    """

    def __enter__(self) -> None:
        self.settings: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.9 and later
        if self.settings is not None:
            self.before = self.settings.fp32_precision
            self.settings.fp32_precision = "bf16"

    def __exit__(self, *error: Any) -> None:
        if self.settings is not None:
            self.settings.fp32_precision = self.before


class CompiledImagination(Imagination):
    """`Imagination` on a CPU: compiled loops write where their results are needed."""

    def __init__(self, model: DreamerModel, steps: Steps, dtype: torch.dtype) -> None:
        super().__init__(model, steps, dtype)
        dynamics = model.dynamics
        self.inputs = [layers(part, steps, dtype)[0] for part in (dynamics.of_deter, dynamics.of_stoch)]
        self.inputs.append(self.of_action)
        block, hidden = self.size.deter // BLOCKS, dynamics.hidden.weight.detach()
        self.hidden_inputs = hidden[:, block:].permute(0, 2, 1).flatten(0, 1).to(dtype)  # [D, 3 h]

    def step(self, features: Tensor, deter: Tensor, action: Tensor, after: Tensor) -> Tensor:
        count, size, w = len(deter), self.size.deter, self.weights
        own, sample = features[:, :size], features[:, size:]
        inputs = torch.empty(count, 3 * self.size.hidden, dtype=self.dtype)
        for place, (x, layer) in enumerate(zip((own, sample, action.to(self.dtype)), self.inputs, strict=True)):
            before = F.linear(x, layer.weight, layer.bias)
            assert layer.gain is not None
            kernels.normed_silu(array(before), 0, array(layer.gain), EPS, array(inputs), place * self.size.hidden)
        block_inputs = as_blocks(F.linear(inputs, self.hidden_inputs, w.hidden_bias), BLOCKS)
        before = torch.baddbmm(block_inputs, own.reshape(count, BLOCKS, -1).transpose(0, 1), w.hidden_own)
        gates = torch.baddbmm(w.gates_bias, self.steps.norm_silu(before, w.hidden_gain), w.gates)
        new = torch.empty_like(deter)
        kernels.gru(array(gates.contiguous()), array(deter), array(new), array(after))
        return new

    def sample(self, features: Tensor, noise: Tensor) -> None:
        logits = self.prior(features)
        probs = torch.empty(logits.shape)
        kernels.mixed_sample(
            array(logits), array(noise.contiguous()), SHARE, array(probs), array(features), self.size.deter
        )
