"""What stands between the matrix products of DreamerV3's dynamics, forwards and backwards, as functions of tensors.

Activations come in two layouts: rows [N, n], and blocks [G, N, k] of N rows with G k numbers each. Norms are over all
numbers of a row. The gradient of a gain has a function of its own: it is needed once, for all steps of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

NORM_EPS = 1e-4
UNIMIX = 0.01  # share of the uniform distribution in every categorical latent


def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x divided by the root mean square of its row, one over this), in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(row_axes(x), keepdim=True) + NORM_EPS)
    return wide * scale, scale


def row_axes(x: Tensor) -> list[int]:
    return [0, 2] if x.dim() == 3 else [1]


def norm_silu(x: Tensor, gain: Tensor) -> Tensor:
    """SiLU of the normed x. gain [n] or [G, 1, k]."""
    y = normed(x)[0] * gain
    return (y * torch.sigmoid(y)).to(x.dtype)


def before_gain(a: Tensor, gain: Tensor, d_out: Tensor) -> Tensor:
    """The gradient of a * gain from that of SiLU(a * gain)."""
    y = a * gain
    s = torch.sigmoid(y)
    return d_out.float() * s * (1 + y * (1 - s))


def norm_silu_backward(x: Tensor, gain: Tensor, d_out: Tensor) -> Tensor:
    """The gradient of x."""
    a, scale = normed(x)
    d_a = before_gain(a, gain, d_out) * gain
    return (scale * (d_a - a * (d_a * a).mean(row_axes(x), keepdim=True))).to(x.dtype)


def norm_silu_gain(x: Tensor, gain: Tensor, d_out: Tensor) -> Tensor:
    """The gradient of the gain, in its shape."""
    a, _ = normed(x)
    return (before_gain(a, gain, d_out) * a).sum(-2, keepdim=x.dim() == 3)


def as_blocks(x: Tensor, blocks: int) -> Tensor:
    """[N, G k] -> [G, N, k], a view"""
    return x.view(len(x), blocks, -1).transpose(0, 1)


def as_rows(x: Tensor) -> Tensor:
    """[G, N, k] -> [N, G k]"""
    return x.transpose(0, 1).flatten(1)


def gru(gates: Tensor, deter: Tensor) -> Tensor:
    """The next state [N, D] from gates [G, N, 3 k]."""
    reset, candidate, update = as_rows_of_gates(gates)
    return torch.lerp(deter, torch.tanh(torch.sigmoid(reset) * candidate), torch.sigmoid(update - 1))


def as_rows_of_gates(gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    reset, candidate, update = (as_rows(part) for part in gates.float().chunk(3, -1))
    return reset, candidate, update


def gru_backward(gates: Tensor, deter: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the gates and of the state, without what flows through the gates."""
    reset, second, update = as_rows_of_gates(gates)
    reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1)
    candidate = torch.tanh(reset * second)
    d_inside = d_out * update * (1 - candidate.square())
    d_update = d_out * (candidate - deter) * update * (1 - update)
    parts = (d_inside * second * reset * (1 - reset), d_inside * reset, d_update)
    return torch.cat([as_blocks(part, len(gates)) for part in parts], -1).to(gates.dtype), d_out * (1 - update)


def mixed_sample(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [N, S C] and uniform noise [N, S] to probabilities, a share of them uniform, and one-hot samples, as rows.

    The probabilities are float32, the samples of the type of the logits.
    """
    groups = logits.view(*noise.shape, -1).float()
    classes = groups.shape[-1]
    probs = (1 - UNIMIX) * groups.softmax(-1) + UNIMIX / classes
    chosen = (probs.cumsum(-1)[..., :-1] <= noise.unsqueeze(-1)).sum(-1, keepdim=True)
    one_hot = chosen == torch.arange(classes, device=logits.device)
    return probs.flatten(1), one_hot.flatten(1).to(logits.dtype)


def mixed_backward(probs: Tensor, noise: Tensor, d_log_probs: Tensor, d_sample: Tensor) -> Tensor:
    """The gradient of the logits from those of the probabilities' logarithms and of the samples, straight-through.

    noise: of which only the shape is used.
    """
    p = probs.view(*noise.shape, -1)
    d = (d_log_probs / probs + d_sample).view_as(p)
    own = p - UNIMIX / p.shape[-1]  # (1 - UNIMIX) softmax
    return (own * (d - (own * d).sum(-1, keepdim=True) / (1 - UNIMIX))).flatten(1)


class NormedSiLUFunction(torch.autograd.Function):
    """SiLU of normed numbers [..., n]: `forward` of rows and a gain, `gradients` of both from that of the result."""

    @staticmethod
    def forward(context: Any, forward: Step, gradients: Pair, x: Tensor, gain: Tensor) -> Tensor:
        x = x.contiguous()
        context.gradients = gradients
        context.save_for_backward(x, gain)
        return forward(x.detach().flatten(0, -2), gain.detach()).view_as(x)

    @staticmethod
    def backward(context: Any, *d_outs: Tensor) -> tuple[None, None, Tensor, Tensor]:
        x, gain = (saved.detach() for saved in context.saved_tensors)
        d_x, d_gain = context.gradients(x.flatten(0, -2), gain, d_outs[0].reshape(-1, x.shape[-1]))
        return None, None, d_x.view_as(x), d_gain


Step: TypeAlias = Callable[..., Tensor]
Pair: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


class Steps(NamedTuple):
    """One implementation of these functions."""

    norm_silu: Step = norm_silu
    norm_silu_backward: Step = norm_silu_backward
    norm_silu_gain: Step = norm_silu_gain
    gru: Step = gru
    gru_backward: Pair = gru_backward
    mixed_sample: Pair = mixed_sample
    mixed_backward: Step = mixed_backward

    def normed_silu(self, x: Tensor, gain: Tensor) -> Tensor:
        """`norm_silu` of [..., n] with a gradient."""

        def gradients(x: Tensor, gain: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
            return self.norm_silu_backward(x, gain, d_out), self.norm_silu_gain(x, gain, d_out)

        return NormedSiLUFunction.apply(self.norm_silu, gradients, x, gain)  # type: ignore[no-any-return, no-untyped-call]


PLAIN = Steps()
