"""Compiled functions of DreamerV3 for tensors on a CPU, float32 or bfloat16: see dreamer_kernels.py.

Each has the results of a plain function, in ops/two_hot.py or models/dreamer_layers.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.ops import dreamer_kernels
from rl_training.ops.two_hot import neighbours
from rl_training.types import Array

NORM_EPS = np.float32(1e-4)


def array(tensor: Tensor) -> Array:
    """The numbers of a contiguous tensor, which it shares; bfloat16 as uint16."""
    tensor = tensor.detach()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def rows(tensor: Tensor) -> Array:
    """[..., n] as an array [M, n]."""
    return array(tensor.reshape(-1, tensor.shape[-1]).contiguous())


class NormedSiLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, gain: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dreamer_kernels.normed_silu(rows(x), 0, array(gain), NORM_EPS, rows(out), 0)
        context.save_for_backward(x, gain)
        return out

    @staticmethod
    def backward(context: Any, *d_outs: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = context.saved_tensors
        d_x, d_gain = torch.empty_like(x), torch.empty_like(gain)
        dreamer_kernels.normed_silu_backward(rows(x), array(gain), NORM_EPS, rows(d_outs[0]), rows(d_x), array(d_gain))
        return d_x, d_gain


def normed_silu(x: Tensor, gain: Tensor) -> Tensor:
    return NormedSiLUFunction.apply(x, gain)  # type: ignore[no-any-return, no-untyped-call]


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """[..., K] -> [...], without a gradient."""
    means = torch.empty(logits.shape[:-1])
    dreamer_kernels.two_hot_mean(rows(logits), array(bins), array(means).reshape(-1))
    return means


class TwoHotLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, values: Tensor, bins: Tensor) -> Tensor:
        log_sums = torch.empty(logits.shape[:-1])
        dreamer_kernels.log_sum_exp(rows(logits), array(log_sums).reshape(-1))
        below, weight = neighbours(values, bins)
        pair = logits.gather(-1, torch.stack([below, below + 1], -1)).float()
        context.save_for_backward(logits, log_sums, below, weight)
        return log_sums - torch.lerp(pair[..., 0], pair[..., 1], weight)

    @staticmethod
    def backward(context: Any, *d_losses: Tensor) -> tuple[Tensor, None, None]:
        logits, log_sums, below, weight = context.saved_tensors
        d_loss = d_losses[0].contiguous()
        d_logits = torch.empty(logits.shape, dtype=logits.dtype)
        sums, scale = array(log_sums).reshape(-1), array(d_loss).reshape(-1)
        dreamer_kernels.softmax_rows(rows(logits), sums, scale, rows(d_logits))
        share = torch.stack([1 - weight, weight], -1) * -d_loss.unsqueeze(-1)
        d_logits.scatter_add_(-1, torch.stack([below, below + 1], -1), share.to(d_logits.dtype))
        return d_logits, None, None


def two_hot_loss(logits: Tensor, values: Tensor, bins: Tensor) -> Tensor:
    return TwoHotLossFunction.apply(logits, values.detach(), bins)  # type: ignore[no-any-return, no-untyped-call]
