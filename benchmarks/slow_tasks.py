"""CartPole whose step takes 2 ms of CPU time, as a simulator's does."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

STEP_SECONDS = 2e-3


class SlowCartPole(CartPoleEnv):
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        began = time.thread_time()  # time in which another process has the core does not count
        result = super().step(action)
        while time.thread_time() - began < STEP_SECONDS:
            pass
        return result


gym.register("SlowCartPole-v1", SlowCartPole, max_episode_steps=500)
