"""Policies as distributions over actions, from the outputs of a network.

`sample` is a function of `noise`, which numpy draws, so that a run's random stream is the same on every device; noise
that is a tensor is used as it is. `mode` is the most likely action, p.kl(q) is KL(p || q). The last axes are those of
an action, over which log_prob, entropy and kl sum. For acting, where a call costs more than its arithmetic, Categorical
and Gaussians also take numpy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.types import Array

Numbers: TypeAlias = Any  # a Tensor, or an ndarray where the class allows it
SMALLEST = np.finfo(np.float32).tiny


class Categorical:
    """One of A actions: logits [..., A], actions int64 [...]."""

    def __init__(self, logits: Numbers) -> None:
        self.log_probs: Numbers
        if isinstance(logits, Tensor):
            self.log_probs = F.log_softmax(logits, -1)
        else:
            shifted = logits - logits.max(-1, keepdims=True)
            self.log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    @property
    def mode(self) -> Numbers:
        return self.log_probs.argmax(-1)

    def noise(self, rng: np.random.Generator) -> Array:
        exponential = rng.standard_exponential(self.log_probs.shape, dtype=np.float32)
        return cast(Array, np.log(np.maximum(exponential, SMALLEST)))  # in float32 it is 0 once in millions of draws

    def sample(self, noise: Numbers) -> Numbers:
        """The Gumbel-max trick: -log of an exponential variable is a Gumbel variable."""
        return (self.log_probs - _like(self.log_probs, noise)).argmax(-1)

    def log_prob(self, action: Numbers) -> Numbers:
        if isinstance(action, Tensor):
            return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return self.log_probs[np.arange(len(action)), action]  # of [N, A]

    def entropy(self) -> Numbers:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: Categorical) -> Numbers:
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)


class MultiCategorical:
    """K independent choices of A_1 .. A_K actions: logits [..., sum A], actions int64 [..., K]."""

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        self.parts = [Categorical(part) for part in torch.split(logits, list(sizes), -1)]

    @property
    def mode(self) -> Tensor:
        return torch.stack([part.mode for part in self.parts], -1)

    def noise(self, rng: np.random.Generator) -> Array:
        return np.concatenate([part.noise(rng) for part in self.parts], -1)

    def sample(self, noise: Numbers) -> Tensor:
        sizes = [part.log_probs.shape[-1] for part in self.parts]
        parts = torch.split(_like(self.parts[0].log_probs, noise), sizes, -1)
        return torch.stack([part.sample(n) for part, n in zip(self.parts, parts, strict=True)], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        return _total([part.log_prob(a) for part, a in zip(self.parts, action.unbind(-1), strict=True)])

    def entropy(self) -> Tensor:
        return _total([part.entropy() for part in self.parts])

    def kl(self, other: MultiCategorical) -> Tensor:
        return _total([part.kl(q) for part, q in zip(self.parts, other.parts, strict=True)])


class Bernoulli:
    """Independent bits: logits [..., *shape], actions int8 [..., *shape]."""

    def __init__(self, logits: Tensor, event_dims: int = 1) -> None:
        self.logits, self.axes = logits, tuple(range(-event_dims, 0))

    @property
    def mode(self) -> Tensor:
        return (self.logits > 0).to(torch.int8)

    def noise(self, rng: np.random.Generator) -> Array:
        return rng.random(self.logits.shape, dtype=np.float32)

    def sample(self, noise: Array) -> Tensor:
        uniform: Tensor = _like(self.logits, noise)
        return (uniform < self.logits.sigmoid()).to(torch.int8)

    def log_prob(self, action: Tensor) -> Tensor:
        return (action * self.logits - F.softplus(self.logits)).sum(self.axes)

    def entropy(self) -> Tensor:
        return (F.softplus(self.logits) - self.logits.sigmoid() * self.logits).sum(self.axes)

    def kl(self, other: Bernoulli) -> Tensor:
        p = self.logits.sigmoid()
        return (p * (self.logits - other.logits) + F.softplus(other.logits) - F.softplus(self.logits)).sum(self.axes)


class DiagGaussian:
    """Independent normals: mean [..., *shape], the same log_std [*shape] in every state, actions [..., *shape]."""

    def __init__(self, mean: Numbers, log_std: Numbers) -> None:
        self.mean, self.log_std, self.library = mean, log_std, _library(mean)
        self.axes = tuple(range(-log_std.ndim, 0))

    @property
    def mode(self) -> Numbers:
        return self.mean

    def noise(self, rng: np.random.Generator) -> Array:
        return cast(Array, rng.standard_normal(self.mean.shape, dtype=np.float32))

    def sample(self, noise: Array) -> Numbers:
        return self.mean + self.library.exp(self.log_std) * _like(self.mean, noise)

    def log_prob(self, action: Numbers) -> Numbers:
        z = (action - self.mean) * self.library.exp(-self.log_std)
        return -0.5 * (z * z).sum(self.axes) - (self.log_std + _HALF_LOG_2PI).sum()

    def entropy(self) -> Numbers:
        return (self.log_std + (0.5 + _HALF_LOG_2PI)).sum().expand(self.mean.shape[: -len(self.axes)])

    def kl(self, other: DiagGaussian) -> Numbers:
        log_ratio = self.log_std - other.log_std
        z = (self.mean - other.mean) * (-other.log_std).exp()
        return (0.5 * ((2 * log_ratio).exp() + z.square() - 1) - log_ratio).sum(self.axes)


class TanhGaussian:
    """tanh of independent normals: mean and log_std [..., A], actions [..., A] between -1 and 1."""

    def __init__(self, mean: Numbers, log_std: Numbers) -> None:
        self.mean, self.log_std, self.library = mean, log_std, _library(mean)

    @property
    def mode(self) -> Numbers:
        """tanh of the mean, which is the median of the actions."""
        return self.library.tanh(self.mean)

    def noise(self, rng: np.random.Generator) -> Array:
        return cast(Array, rng.standard_normal(self.mean.shape, dtype=np.float32))

    def sample(self, noise: Array) -> Numbers:
        return self.library.tanh(self.mean + self.library.exp(self.log_std) * _like(self.mean, noise))

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [..., A] and their log-densities [...], both differentiable.

        log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)) is exact even where tanh(u) rounds to 1.
        """
        u = self.mean + self.log_std.exp() * noise
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        log_prob = -(0.5 * noise * noise + self.log_std + log_slope + _HALF_LOG_2PI).sum(-1)
        return u.tanh(), log_prob


class BoundedGaussian:
    """Independent normals with mean tanh(a) and standard deviation from .1 to 1: DreamerV3's actions [..., A].

    a and b [..., A] are outputs of a network; b = 0 gives a standard deviation of .89. The environment clips.
    """

    STD_RANGE = (0.1, 1.0)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        low, high = self.STD_RANGE
        self.mean, self.std = a.tanh(), low + (high - low) * torch.sigmoid(b + 2)

    @property
    def mode(self) -> Tensor:
        return self.mean

    def noise(self, rng: np.random.Generator) -> Array:
        return cast(Array, rng.standard_normal(self.mean.shape, dtype=np.float32))

    def sample(self, noise: Numbers) -> Tensor:
        return self.mean + self.std * cast(Tensor, _like(self.mean, noise))

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) / self.std
        return -(0.5 * z.square() + self.std.log() + _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.std.log() + (0.5 + _HALF_LOG_2PI)).sum(-1)

    def kl(self, other: BoundedGaussian) -> Tensor:
        ratio, z = self.std / other.std, (self.mean - other.mean) / other.std
        return (0.5 * (ratio.square() + z.square() - 1) - ratio.log()).sum(-1)


Distribution: TypeAlias = Categorical | MultiCategorical | Bernoulli | DiagGaussian | BoundedGaussian


def mean_kl(old: Distribution, new: Distribution) -> Tensor:
    """E[KL(old || new)] of two policies of the same class."""
    return cast(Tensor, old.kl(new).mean())  # type: ignore[arg-type]


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)


def _like(x: Numbers, noise: Numbers) -> Numbers:
    """The noise as a tensor on the device of `x`, or as it is if it is one or `x` is an array."""
    is_ready = isinstance(noise, Tensor) or not isinstance(x, Tensor)
    return noise if is_ready else torch.from_numpy(noise).to(x.device)


def _library(x: Numbers) -> Any:
    return torch if isinstance(x, Tensor) else np
