"""Normalisation of observations and rewards by running statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.data.state_check import compare_state
from rl_training.errors import InputError
from rl_training.types import Array, Observation, State

EPSILON = 1e-8
LIMIT = np.float32(10.0)


class RunningMeanStd:
    """Mean and variance of all rows seen so far, in float64 (Chan, Golub & LeVeque, 1979).

    `offset` and `scale` are the mean and 1 / std in float32, ready to normalise with.
    """

    recent: RunningMeanStd | None = None  # also updated, where it is set: see data.merged_statistics

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self._set(np.zeros(shape, np.float64), np.zeros(shape, np.float64), 0.0)

    def _set(self, mean: Array, squares: Array, count: float) -> None:
        """squares: the sum of squared deviations from the mean."""
        self.mean, self._squares, self.count = mean, squares, count
        # Not astype, which takes longer than all the rest where the mean is one number.
        self.offset: Any = np.float32(mean)
        self.scale: Any = np.float32(1.0 / np.sqrt(self.var + EPSILON))

    @property
    def var(self) -> Array:
        """The population variance; ones before the first row."""
        return self._squares / self.count if self.count else np.ones_like(self.mean)

    def update(self, batch: Array) -> None:
        """Add the rows of `batch` [B, *shape]."""
        size = len(batch)
        if not size:
            return
        batch_mean = np.add.reduce(batch, 0, np.float64) / size
        deviation = batch - batch_mean
        deviation *= deviation
        self.merge(batch_mean, np.add.reduce(deviation, 0), size)
        if self.recent is not None:
            self.recent.update(batch)

    def merge(self, mean: Array, squares: Array, count: float) -> None:
        """Add `count` rows of this mean and this sum of squared deviations from it."""
        total = self.count + count
        delta = mean - self.mean
        squares = self._squares + squares + delta * delta * (self.count * count / total)
        self._set(self.mean + delta * (count / total), squares, total)

    def state_dict(self) -> State:
        return {"mean": self.mean.copy(), "squares": self._squares.copy(), "count": float(self.count)}

    def load_state_dict(self, state: State) -> None:
        compare_state(self.state_dict(), state, "statistics")
        mean, squares, count = state["mean"], state["squares"], float(state["count"])
        if not (np.isfinite(mean).all() and np.isfinite(squares).all() and squares.min(initial=0.0) >= 0):
            raise ValueError("statistics: the mean and the sum of squares should be finite, the latter not negative")
        if not 0 <= count < math.inf:
            raise ValueError(f"statistics: the count should be a number of rows, got {count}")
        self._set(np.array(mean), np.array(squares), count)

    def normalized(self, value: Array) -> Array:
        """(value - mean) / std, clipped."""
        scaled = value - self.offset
        scaled *= self.scale
        return _clip(scaled)

    def original(self, normalized: Array) -> Array:
        """The inverse of `normalized`, without what was clipped."""
        value: Array = normalized / self.scale + self.offset
        return value


class Normalizer:
    """Normalises float observations to mean 0 and deviation 1, and divides rewards by the deviation of the return.

    The return is discounted: R <- gamma R + r, where `gamma` must be the algorithm's. Integer and image observations
    stay as they are. Only `observe` and `reward` update the statistics. The runner calls them in training only.
    """

    def __init__(
        self, space: gym.Space, num_envs: int, *, observation: bool = True, reward: bool = True, gamma: float = 0.99
    ) -> None:
        self.gamma = gamma
        boxes = float_boxes(space) if observation else {}
        self._obs = {key: RunningMeanStd(box.shape or ()) for key, box in boxes.items()}
        self._reward = RunningMeanStd() if reward else None
        self.returns = np.zeros(num_envs, np.float64)  # [N] R of the current episodes

    def statistics(self) -> list[RunningMeanStd]:
        """Of each normalised part of the observation, then of the return."""
        return [*self._obs.values(), *([self._reward] if self._reward else [])]

    @property
    def observation_statistics(self) -> dict[str, RunningMeanStd]:
        """By the key of the part of the observation, "" where it has no parts."""
        return self._obs

    def space(self, space: gym.Space) -> gym.Space:
        """The space of normalised observations."""
        if not self._obs:
            return space
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: _limits(child) if key in self._obs else child for key, child in space.items()})
        return _limits(space)

    def observe(self, obs: Observation, rows: Array | None = None) -> None:
        """Update the statistics with observations [N, ...], or with those at `rows` only."""
        for key, statistics in self._obs.items():
            value = obs[key] if isinstance(obs, dict) else obs
            statistics.update(value if rows is None else value[rows])

    def observation(self, obs: Observation) -> Observation:
        """(obs - mean) / std, clipped, as a new array or dict."""
        return self._mapped(RunningMeanStd.normalized, obs)

    def original_observation(self, obs: Observation) -> Observation:
        """The inverse of `observation`, without what was clipped, for arrays with any leading axes."""
        return self._mapped(RunningMeanStd.original, obs)

    def _mapped(self, function: Callable[[RunningMeanStd, Array], Array], obs: Observation) -> Observation:
        if not self._obs:
            return obs
        if isinstance(obs, dict):
            return {key: function(self._obs[key], x) if key in self._obs else x for key, x in obs.items()}
        return function(self._obs[""], obs)

    def reward(self, reward: Array, done: Array, live: Array | None = None) -> Array:
        """Update R and return r / std(R), clipped; all are [N]. R is 0 after `done`, and unchanged where not `live`."""
        if self._reward is None:
            return reward
        self.returns *= self.gamma if live is None else np.where(live, self.gamma, 1.0)
        self.returns += reward
        self._reward.update(self.returns if live is None else self.returns[live])
        self.returns[done] = 0.0
        return self.scale_reward(reward)

    def scale_reward(self, reward: Array) -> Array:
        """r / std(R), clipped, for rewards of any shape. The statistics do not change."""
        if self._reward is None:
            return reward
        return _clip(reward * self._reward.scale)

    def original_reward(self, reward: Array) -> Array:
        """The inverse of `scale_reward`, without what was clipped."""
        return reward if self._reward is None else reward / self._reward.scale

    def forget(self, rows: list[int]) -> None:
        """Reset R of these environments, whose episodes were lost."""
        self.returns[rows] = 0.0

    def state_dict(self) -> State:
        return {
            "observation": {key: statistics.state_dict() for key, statistics in self._obs.items()},
            "reward": self._reward.state_dict() if self._reward else None,
            "returns": self.returns.copy(),
        }

    def load_state_dict(self, state: State) -> None:
        """Load the statistics. R is loaded only where the number of environments is the same."""
        compare_state({"observation": dict, "reward": dict | None, "returns": np.ndarray}, state, "normalizer")
        if set(state["observation"]) != set(self._obs) or (state["reward"] is None) != (self._reward is None):
            raise InputError("the saved normaliser has other parts: keep the env_kwargs.wrappers the run began with")
        for key, statistics in self._obs.items():
            statistics.load_state_dict(state["observation"][key])
        if self._reward:
            self._reward.load_state_dict(state["reward"])
        if len(state["returns"]) == len(self.returns):
            compare_state(self.returns, state["returns"], "normalizer.returns")
            self.returns = state["returns"].copy()


def _clip(value: Array) -> Array:
    """Clip in place. This is faster than np.clip on small arrays."""
    np.maximum(value, -LIMIT, out=value)
    np.minimum(value, LIMIT, out=value)
    return value


def float_boxes(space: gym.Space) -> dict[str, gym.Space]:
    """The Box spaces of floats in a Dict space, by key, or the space itself with the key ""."""
    children = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    return {key: c for key, c in children.items() if isinstance(c, spaces.Box) and np.issubdtype(c.dtype, np.floating)}


def _limits(space: gym.Space) -> gym.Space:
    return spaces.Box(-float(LIMIT), float(LIMIT), space.shape, np.float32) if float_boxes(space) else space
