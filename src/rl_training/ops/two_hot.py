"""DreamerV3's rewards and values: distributions over exponentially spaced bins (Hafner et al., Nature 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.types import Number

LIMIT = 20.0  # the bins are symexp(-20) .. symexp(20)


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|): close to x around 0, logarithmic far from it."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


def symexp_bins(count: int = 255) -> Tensor:
    """[count] increasing numbers symexp(-20) .. symexp(20), exactly antisymmetric; an odd count has 0 in the middle."""
    upper = symexp(torch.linspace(-LIMIT, LIMIT, count, dtype=torch.float64)[(count + 1) // 2 :]).float()
    return torch.cat([-upper.flip(0), torch.zeros(count % 2), upper])


def neighbours(values: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """(the index of the bin below [...] int64, the weight of the bin above [...]). Values beyond the ends saturate."""
    values = values.contiguous().to(bins.dtype)
    below = (torch.searchsorted(bins, values, right=True) - 1).clamp_(0, len(bins) - 2)
    low = bins[below]
    return below, ((values - low) / (bins[below + 1] - low)).clamp_(0, 1)


def two_hot(values: Tensor, bins: Tensor) -> Tensor:
    """[...] -> [..., K]: probabilities of the two bins next to each value, with the value as their mean."""
    below, weight = neighbours(values, bins)
    probs = torch.zeros(*below.shape, len(bins), dtype=bins.dtype, device=bins.device)
    probs.scatter_(-1, below.unsqueeze(-1), (1 - weight).unsqueeze(-1))
    return probs.scatter_(-1, below.unsqueeze(-1) + 1, weight.unsqueeze(-1))


def two_hot_loss(
    logits: Tensor, values: Tensor, bins: Tensor, others: Tensor | None = None, coefficient: Number = 0.0
) -> Tensor:
    """The cross-entropy [...] of logits [..., K] against two-hot targets of values [...], which are constants.

    others [...]: the cross-entropy against these is added, times `coefficient`.
    """
    log_probs = F.log_softmax(logits.float(), -1)
    loss = -at_value(log_probs, values, bins)
    return loss if others is None else loss - coefficient * at_value(log_probs, others, bins)


def at_value(log_probs: Tensor, values: Tensor, bins: Tensor) -> Tensor:
    """The mean [...] of log_probs [..., K] under the two-hot distributions of values [...]."""
    below, weight = neighbours(values.detach(), bins)
    pair = log_probs.gather(-1, torch.stack([below, below + 1], -1))
    return torch.lerp(pair[..., 0], pair[..., 1], weight)


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """Logits [..., K] to means [...].

    The probabilities of opposite bins are subtracted first, so that symmetric logits have the mean 0. A plain sum of
    numbers up to 5e8 gives -0.3 for logits of zero.
    """
    probs, half = logits.float().softmax(-1), len(bins) // 2
    return ((probs[..., -half:] - probs[..., :half].flip(-1)) * bins[-half:]).sum(-1)
