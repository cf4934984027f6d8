"""Tiny environments whose every number is known beforehand."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def noted(runner: Any) -> list[Any]:
    """A list that grows by every episode which the runner finishes from now on."""
    found, step = [], runner.step

    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        found.extend(runner.statistics.finished)
        return result

    runner.step = stepping
    return found


class CounterEnv(gym.Env):
    """Counts: obs = (episode, step), reward = 10 * step + action; ends after `length` steps."""

    def __init__(self, length: int = 3, ends: str = "terminated") -> None:
        self.observation_space = spaces.Box(0, 1000, (2,), np.float64)
        self.action_space = spaces.Discrete(5)
        self.length, self.ends = length, ends
        self.episode, self.t = -1, 0

    def _obs(self) -> np.ndarray:
        return np.array([self.episode, self.t], np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.t < self.length, "stepped after the end"
        self.t += 1
        over = self.t == self.length
        reward = 10.0 * self.t + float(action)
        return self._obs(), reward, over and self.ends == "terminated", over and self.ends == "truncated", {}


class FakeEnvPool:
    """EnvPool's documented behaviour: last observation at an end, the next step resets, partial resets in any order."""

    def __init__(self, envs: list[gym.Env]) -> None:
        self.envs = envs
        self.observation_space, self.action_space = envs[0].observation_space, envs[0].action_space
        self.done = [True] * len(envs)

    def reset(self, env_id: np.ndarray | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        ids = np.arange(len(self.envs)) if env_id is None else env_id[::-1]
        for i in ids:
            self.done[i] = False
        return np.stack([self.envs[i].reset()[0] for i in ids]), {"env_id": np.asarray(ids, np.int32)}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        rows = []
        for i, env in enumerate(self.envs):
            row = (*env.reset()[:1], 0.0, False, False) if self.done[i] else env.step(action[i])[:4]
            self.done[i] = row[2] or row[3]
            rows.append(row)
        obs, reward, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
        return obs, reward.astype(np.float32), terminated, truncated, {"env_id": np.arange(len(self.envs))}

    def close(self) -> None:
        return None


class RandomWalk(gym.Env):
    """A walk that draws from np_random at every step; with `honest=False` from a generator no seed reaches."""

    def __init__(self, honest: bool = True, length: int = 50) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.honest, self.length = honest, length
        self.secret = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.normal()
        return np.array([self.x], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        rng = self.np_random if self.honest else self.secret
        self.t += 1
        self.x += float(action[0]) + rng.normal()
        return np.array([self.x], np.float32), float(self.x), abs(self.x) > 20, self.t >= self.length, {}


class Structured(gym.Env):
    """Dict, Tuple and offset spaces; the reward is the action as the environment received it."""

    def __init__(self, action_space: gym.Space | None = None) -> None:
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (2, 2, 3), np.uint8),
                "parts": spaces.Tuple((spaces.Discrete(4, start=3), spaces.Box(-1, 1, (2,), np.float64))),
                "flags": spaces.MultiBinary(3),
                "dials": spaces.MultiDiscrete([3, 4], start=[1, 2]),
            }
        )
        self.action_space = action_space or spaces.Discrete(3, start=-1)
        self.received: list[Any] = []
        self.t = 0

    def _obs(self) -> dict[str, Any]:
        return {
            "camera": np.full((2, 2, 3), self.t, np.uint8),
            "parts": (np.int64(3 + self.t % 4), np.full(2, self.t / 10)),
            "flags": np.array([1, 0, self.t % 2], np.int8),
            "dials": np.array([1 + self.t % 3, 2 + self.t % 4]),
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received.append(action)
        self.t += 1
        return self._obs(), float(np.sum(action)), self.t == 3, False, {}


class Cue(gym.Env):
    """A sign is shown once, then nothing for `blank` steps, then a question: the action that matches the sign earns 1,
    the other -1. Without memory no policy earns anything on average."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, blank: int = 1) -> None:
        self.blank = blank

    def _obs(self) -> np.ndarray:
        return np.array([self.sign if self.t == 0 else 0.0, self.t > self.blank], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.sign = 0, float(self.np_random.choice([-1.0, 1.0]))
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        asked = self.t > self.blank
        reward = 0.0 if not asked else 1.0 if (action == 1) == (self.sign > 0) else -1.0
        self.t += 1
        return self._obs(), reward, asked, False, {}


class SixSteps(gym.Env):
    """Six steps, seen as a one-hot vector; at each, one of four actions pays 1 and the others nothing."""

    PAYING = (2, 0, 3, 1, 1, 2)

    def __init__(self, paying: tuple[int, ...] = PAYING) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (len(paying),), np.float32)
        self.action_space = spaces.Discrete(4)
        self.paying, self.t = paying, 0

    def _obs(self) -> np.ndarray:
        return np.eye(len(self.paying) + 1, dtype=np.float32)[self.t, :-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.paying[self.t])
        self.t += 1
        return self._obs(), reward, self.t == len(self.paying), False, {}


for name, cls in (
    ("Counter", CounterEnv),
    ("RandomWalk", RandomWalk),
    ("Structured", Structured),
    ("Cue", Cue),
    ("SixSteps", SixSteps),
):
    if f"{name}ForTests-v0" not in gym.registry:
        gym.register(f"{name}ForTests-v0", cls)
