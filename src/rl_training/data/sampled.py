"""Sampled observations of a space, in the range that a policy meets."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.data.normalize import Normalizer, RunningMeanStd
from rl_training.types import Array, Observation

USUAL = 10.0  # bounds of what an environment declares as unbounded, or as far too wide
MASK = "action_mask"


def sampled_observations(
    space: gym.Space, rows: int, normalizer: Normalizer | None, rng: np.random.Generator
) -> Observation:
    """Observations [rows, ...] of a model's space, before normalisation: around the mean where that is known."""
    known = normalizer.observation_statistics if normalizer else {}
    if not isinstance(space, spaces.Dict):
        return sampled(space, rows, known.get(""), rng)
    obs = {key: sampled(part, rows, known.get(key), rng) for key, part in space.spaces.items()}
    if isinstance(space.spaces.get(MASK), spaces.MultiBinary):
        obs[MASK][np.arange(rows), rng.integers(obs[MASK].shape[1], size=rows)] = 1  # a state without actions is none
    return obs


def sampled(space: gym.Space, rows: int, known: RunningMeanStd | None, rng: np.random.Generator) -> Array:
    shape = (rows, *(space.shape or ()))
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.n, size=rows)
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(np.broadcast_to(space.nvec, shape))
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(2, size=shape).astype(space.dtype)
    assert isinstance(space, spaces.Box)
    if space.dtype == np.uint8:
        brightness = rng.random((rows, *(1 for _ in space.shape)))  # noise alone looks the same to a convolution
        return np.asarray(space.low + brightness * rng.random(shape) * (space.high - space.low), np.uint8)
    low, high = usual_bounds(space)
    value: Any = rng.uniform(low.astype(np.float64), high.astype(np.float64), size=shape)
    if known is not None and known.count:
        value = known.mean + np.sqrt(known.var) * rng.standard_normal(shape)
    return np.asarray(value, np.float32)


def usual_bounds(space: spaces.Box) -> tuple[Array, Array]:
    """The part of a Box within +-USUAL, where there is one."""
    low, high = np.clip(space.low, -USUAL, USUAL), np.clip(space.high, -USUAL, USUAL)
    outside = low >= high
    return np.where(outside, space.low, low), np.where(outside, space.high, high)
