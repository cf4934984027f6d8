"""Values and rewards as what a network puts out and is trained on: a distribution over atoms, or one bounded number.

MuZero (Schrittwieser et al., arXiv:1911.08265, appendix F), with the transform of Pohlen et al. (arXiv:1805.11593).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.config import InputError

EPSILON = 0.001  # of the transform: how much of x itself is left in h(x)


class Support:
    """Numbers as distributions over the atoms h(x) = -limit .. limit; those beyond become the outermost atom."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 2 * limit + 1

    @staticmethod
    def transform(x: Tensor) -> Tensor:
        """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, without the difference, which keeps few digits near 0."""
        return x / ((x.abs() + 1).sqrt() + 1) + EPSILON * x

    @staticmethod
    def inverse(y: Tensor) -> Tensor:
        """x where h(x) = y.

        With u = sqrt(|x| + 1) - 1 there is |x| = u (u + 2) and |y| = epsilon u^2 + (1 + 2 epsilon) u; u is the positive
        root of that, in the form that subtracts nothing.
        """
        half = 0.5 + EPSILON
        u = y / ((EPSILON * y.abs() + half**2).sqrt() + half)
        return u * (u.abs() + 2)

    def to_probs(self, x: Tensor) -> Tensor:
        """[...] -> [..., size]: all weight on the two atoms next to h(x), whose mean it is."""
        y = self.transform(x).clamp(-self.limit, self.limit)
        return (1 - (self._atoms(y) - y.unsqueeze(-1)).abs()).clamp(min=0)

    def to_scalar(self, logits: Tensor) -> Tensor:
        """[..., size] -> [...]: the number whose transform is the distribution's mean."""
        return self.inverse(logits.softmax(-1) @ self._atoms(logits))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The cross-entropy [...] of logits [..., size] against numbers [...]."""
        return -(self.to_probs(target) * F.log_softmax(logits, -1)).sum(-1)

    def _atoms(self, like: Tensor) -> Tensor:
        # Made anew: what a CUDA graph captured must not be kept for use outside of it.
        return torch.arange(-self.limit, self.limit + 1, dtype=like.dtype, device=like.device)


class Scalar:
    """Numbers between -1 and 1, learned by squared error, as outcomes of board games are."""

    size = 1

    def to_scalar(self, logits: Tensor) -> Tensor:
        """[..., 1] -> [...]"""
        return logits[..., 0].tanh()

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The squared error [...] of logits [..., 1] against numbers [...]."""
        return (self.to_scalar(logits) - target).square()


AnySupport: TypeAlias = Support | Scalar


def make_support(limit: int) -> AnySupport:
    """2 limit + 1 atoms; with limit 0 one number between -1 and 1."""
    if limit < 0:
        raise InputError(
            f"a support's limit is {limit}: give the largest h(x) to be told apart, or 0 for numbers in [-1, 1]"
        )
    return Support(limit) if limit else Scalar()
