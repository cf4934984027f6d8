"""Compiled functions of DreamerV3 for tensors on a CPU, float32 or bfloat16: see dreamer_kernels.py.

Each has the results of a plain function, in two_hot.py, dreamer_steps.py or models/dreamer_layers.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.ops import dreamer_kernels
from rl_training.ops.dreamer_steps import NORM_EPS, UNIMIX, NormedSiLUFunction, Steps
from rl_training.ops.two_hot import neighbours
from rl_training.types import Array

EPS, SHARE = np.float32(NORM_EPS), np.float32(UNIMIX)


def array(tensor: Tensor) -> Array:
    """The numbers of a contiguous tensor, which it shares; bfloat16 as uint16."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def rows(tensor: Tensor) -> Array:
    """[..., n] as an array [M, n]."""
    return array(tensor.reshape(-1, tensor.shape[-1]).contiguous())


def normed_silu(x: Tensor, gain: Tensor) -> Tensor:
    return NormedSiLUFunction.apply(norm_silu, norm_gradients, x, gain)  # type: ignore[no-any-return, no-untyped-call]


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """[..., K] -> [...], without a gradient."""
    means = torch.empty(logits.shape[:-1])
    dreamer_kernels.two_hot_mean(rows(logits), array(bins), array(means).reshape(-1))
    return means


class TwoHotLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, bins: Tensor, targets: list[tuple[Tensor, float]]) -> Tensor:
        """targets: values [...] and their coefficients."""
        log_sums = torch.empty(logits.shape[:-1])
        dreamer_kernels.log_sum_exp(rows(logits), array(log_sums).reshape(-1))
        losses, shares, places = [], [], []
        for values, coefficient in targets:
            below, weight = neighbours(values, bins)
            share, place = torch.stack([1 - weight, weight], -1), torch.stack([below, below + 1], -1)
            losses.append(coefficient * (log_sums - (share * logits.gather(-1, place)).sum(-1)))
            shares.append(coefficient * share)
            places.append(place)
        context.save_for_backward(logits, log_sums, torch.cat(shares, -1), torch.cat(places, -1))
        context.total = sum(coefficient for _, coefficient in targets)
        return torch.stack(losses).sum(0)

    @staticmethod
    def backward(context: Any, *d_losses: Tensor) -> tuple[Tensor, None, None]:
        logits, log_sums, shares, places = context.saved_tensors
        d_loss, d_logits = d_losses[0], torch.empty(logits.shape, dtype=logits.dtype)
        sums, scale = array(log_sums).reshape(-1), array(context.total * d_loss).reshape(-1)
        dreamer_kernels.softmax_rows(rows(logits), sums, scale, rows(d_logits))
        d_logits.scatter_add_(-1, places, (-d_loss.unsqueeze(-1) * shares).to(d_logits.dtype))
        return d_logits, None, None


def two_hot_loss(
    logits: Tensor, values: Tensor, bins: Tensor, others: Tensor | None = None, coefficient: float = 0.0
) -> Tensor:
    targets = [(values.detach(), 1.0)] + ([] if others is None else [(others.detach(), coefficient)])
    return TwoHotLossFunction.apply(logits, bins, targets)  # type: ignore[no-any-return, no-untyped-call]


def norm_silu(x: Tensor, gain: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.dim() == 3:
        dreamer_kernels.block_normed_silu(array(x), array(gain)[:, 0], EPS, array(out))
    else:
        dreamer_kernels.normed_silu(array(x), 0, array(gain), EPS, array(out), 0)
    return out


def norm_silu_backward(x: Tensor, gain: Tensor, d_out: Tensor) -> Tensor:
    return norm_gradients(x, gain, d_out)[0]


def norm_silu_gain(x: Tensor, gain: Tensor, d_out: Tensor) -> Tensor:
    return norm_gradients(x, gain, d_out)[1]


def norm_gradients(x: Tensor, gain: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the gain."""
    x, d_out = x.contiguous(), d_out.contiguous()
    d_x, d_gain = torch.empty_like(x), torch.zeros_like(gain)
    if x.dim() == 3:
        dreamer_kernels.block_normed_silu_backward(
            array(x), array(gain)[:, 0], EPS, array(d_out), array(d_x), array(d_gain)[:, 0]
        )
    else:
        dreamer_kernels.normed_silu_backward(array(x), array(gain), EPS, array(d_out), array(d_x), array(d_gain))
    return d_x, d_gain


def gru(gates: Tensor, deter: Tensor) -> Tensor:
    gates, deter = gates.contiguous(), deter.contiguous()
    new = torch.empty_like(deter)
    dreamer_kernels.gru(array(gates), array(deter), array(new), array(new))
    return new


def gru_backward(gates: Tensor, deter: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    gates, deter, d_out = gates.contiguous(), deter.contiguous(), d_out.contiguous()
    d_gates, d_deter = torch.empty_like(gates), torch.empty_like(deter)
    dreamer_kernels.gru_backward(array(gates), array(deter), array(d_out), array(d_gates), array(d_deter))
    return d_gates, d_deter


def mixed_sample(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    probs, sample = torch.empty(logits.shape), torch.empty_like(logits)
    dreamer_kernels.mixed_sample(array(logits), array(noise.contiguous()), SHARE, array(probs), array(sample), 0)
    return probs, sample


def mixed_backward(probs: Tensor, noise: Tensor, d_log_probs: Tensor, d_sample: Tensor) -> Tensor:
    d_logits = torch.empty_like(probs)
    classes = probs.shape[1] // noise.shape[1]
    dreamer_kernels.mixed_backward(
        array(probs), SHARE, classes, array(d_log_probs.contiguous()), array(d_sample.contiguous()), array(d_logits)
    )
    return d_logits


STEPS = Steps(
    norm_silu, norm_silu_backward, norm_silu_gain, gru, gru_backward, mixed_sample, mixed_backward
)  # fmt: skip
