"""How networks represent values and rewards: as a distribution over atoms, or as one bounded number.

MuZero (Schrittwieser et al., arXiv:1911.08265, appendix F), with the transform of Pohlen et al. (arXiv:1805.11593).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.errors import InputError

EPSILON = 0.001  # the linear part of h(x)


class Support:
    """Numbers as distributions over the atoms h(x) = -limit .. limit. Larger numbers are clipped."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 2 * limit + 1

    @staticmethod
    def transform(x: Tensor) -> Tensor:
        """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, in a form without the difference, which is inexact near 0."""
        return x / ((x.abs() + 1).sqrt() + 1) + EPSILON * x

    @staticmethod
    def inverse(y: Tensor) -> Tensor:
        """x where h(x) = y.

        With u = sqrt(|x| + 1) - 1: |x| = u (u + 2) and |y| = epsilon u^2 + (1 + 2 epsilon) u. The code has the positive
        root u, in a form without a difference.
        """
        half = 0.5 + EPSILON
        u = y / ((EPSILON * y.abs() + half**2).sqrt() + half)
        return u * (u.abs() + 2)

    def to_probs(self, x: Tensor) -> Tensor:
        """[...] -> [..., size]: probabilities of the two atoms next to h(x), with mean h(x)."""
        y = self.transform(x).clamp(-self.limit, self.limit)
        return (1 - (self._atoms(y) - y.unsqueeze(-1)).abs()).clamp(min=0)

    def to_scalar(self, logits: Tensor) -> Tensor:
        """Logits [..., size] -> [...]: h^-1 of the mean atom."""
        return self.inverse(logits.softmax(-1) @ self._atoms(logits))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The cross-entropy [...] of logits [..., size] against numbers [...]."""
        return -(self.to_probs(target) * F.log_softmax(logits, -1)).sum(-1)

    def _atoms(self, like: Tensor) -> Tensor:
        # Not cached: a tensor made inside a CUDA graph must not be used outside of it.
        return torch.arange(-self.limit, self.limit + 1, dtype=like.dtype, device=like.device)


class Scalar:
    """Numbers in [-1, 1], trained by squared error, for the outcomes of board games."""

    size = 1

    def to_scalar(self, logits: Tensor) -> Tensor:
        """[..., 1] -> [...]"""
        return logits[..., 0].tanh()

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The squared error [...] of logits [..., 1] against numbers [...]."""
        return (self.to_scalar(logits) - target).square()


AnySupport: TypeAlias = Support | Scalar


def make_support(limit: int) -> AnySupport:
    """A support of 2 limit + 1 atoms; with limit 0 one number in [-1, 1]."""
    if limit < 0:
        raise InputError(
            f"a support's limit is {limit}: give the largest h(x) to be told apart, or 0 for numbers in [-1, 1]"
        )
    return Support(limit) if limit else Scalar()
