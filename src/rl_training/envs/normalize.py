"""Observations and rewards on a common scale, by running statistics of what the training environments gave."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.config import InputError
from rl_training.data.state_check import compare_state
from rl_training.data.statistics import RunningMeanStd
from rl_training.types import Array, Observation, State

EPSILON = 1e-8
LIMIT = np.float32(10.0)


class Normalizer:
    """Centres and scales float observations; scales rewards by the deviation of the discounted return R <- gamma R + r.

    `gamma` must be the algorithm's. Integer and image observations pass as they are. The statistics change only
    through `observe` and `reward`, which the runner calls in training alone.
    """

    def __init__(
        self, space: gym.Space, num_envs: int, *, observation: bool = True, reward: bool = True, gamma: float = 0.99
    ) -> None:
        self.gamma = gamma
        self._obs = {key: _Scaler(child.shape) for key, child in _float_boxes(space).items()} if observation else {}
        self._reward = RunningMeanStd() if reward else None
        self._returns = np.zeros(num_envs, np.float64)  # [N], discounted, of the episodes under way

    def space(self, space: gym.Space) -> gym.Space:
        """The space of normalised observations."""
        if not self._obs:
            return space
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: _limits(child) if key in self._obs else child for key, child in space.items()})
        return _limits(space)

    def observe(self, obs: Observation, rows: Array | None = None) -> None:
        """Take observations [N, ...] (only `rows` of them) into the statistics."""
        for key, scaler in self._obs.items():
            value = obs[key] if isinstance(obs, dict) else obs
            scaler.update(value if rows is None else value[rows])

    def observation(self, obs: Observation) -> Observation:
        """(obs - mean) / std, clipped, as a new array (or dict)."""
        if not self._obs:
            return obs
        if isinstance(obs, dict):
            return {key: self._obs[key](value) if key in self._obs else value for key, value in obs.items()}
        return self._obs[""](obs)

    def reward(self, reward: Array, done: Array, live: Array | None = None) -> Array:
        """r / std(R), clipped; [N] each. R starts anew where `done`; rows that are not live leave no trace."""
        if self._reward is None:
            return reward
        self._returns *= self.gamma if live is None else np.where(live, self.gamma, 1.0)
        self._returns += reward
        self._reward.update(self._returns if live is None else self._returns[live])
        self._returns[done] = 0.0
        return self.scale_reward(reward)

    def scale_reward(self, reward: Array) -> Array:
        """r / std(R), clipped, by the statistics as they are; of any shape."""
        if self._reward is None:
            return reward
        return _clip(reward * np.float32(1.0 / np.sqrt(self._reward.var + EPSILON)))

    def forget(self, rows: list[int]) -> None:
        """The episodes under way in these environments are gone."""
        self._returns[rows] = 0.0

    def state_dict(self) -> State:
        return {
            "observation": {key: scaler.statistics.state_dict() for key, scaler in self._obs.items()},
            "reward": self._reward.state_dict() if self._reward else None,
            "returns": self._returns.copy(),
        }

    def load_state_dict(self, state: State) -> None:
        """Load statistics; the returns under way only where the number of environments is the same."""
        compare_state({"observation": dict, "reward": dict | None, "returns": np.ndarray}, state, "normalizer")
        if set(state["observation"]) != set(self._obs) or (state["reward"] is None) != (self._reward is None):
            raise InputError("the saved normaliser has other parts: keep the env_kwargs.wrappers the run began with")
        for key, scaler in self._obs.items():
            scaler.load(state["observation"][key])
        if self._reward:
            self._reward.load_state_dict(state["reward"])
        if len(state["returns"]) == len(self._returns):
            compare_state(self._returns, state["returns"], "normalizer.returns")
            self._returns = state["returns"].copy()


class _Scaler:
    """One array's statistics, with the mean and 1/std that the next call needs in float32."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        self.statistics = RunningMeanStd(shape or ())
        self._set()

    def _set(self) -> None:
        self._mean = self.statistics.mean.astype(np.float32)
        self._scale = (1.0 / np.sqrt(self.statistics.var + EPSILON)).astype(np.float32)

    def update(self, rows: Array) -> None:
        self.statistics.update(rows)
        self._set()

    def load(self, state: State) -> None:
        self.statistics.load_state_dict(state)
        self._set()

    def __call__(self, value: Array) -> Array:
        scaled = value - self._mean
        scaled *= self._scale
        return _clip(scaled)


def _clip(value: Array) -> Array:
    """In place, and faster than np.clip on small arrays."""
    np.maximum(value, -LIMIT, out=value)
    np.minimum(value, LIMIT, out=value)
    return value


def _float_boxes(space: gym.Space) -> dict[str, gym.Space]:
    children = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    return {key: c for key, c in children.items() if isinstance(c, spaces.Box) and np.issubdtype(c.dtype, np.floating)}


def _limits(space: gym.Space) -> gym.Space:
    is_float = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    return spaces.Box(-float(LIMIT), float(LIMIT), space.shape, np.float32) if is_float else space
