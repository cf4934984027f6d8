"""CartPole whose observations hide the velocities: they have to be remembered from earlier positions.

As in rl-zoo the velocities are zero, not left out, so that networks are of the same size with and without them.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

from rl_training.types import Array

SEEN = np.array([1, 0, 1, 0], np.float32)  # position, velocity, angle, angular velocity


class CartPoleNoVelocity(CartPoleEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs * SEEN, info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return obs * SEEN, reward, terminated, truncated, info


gym.register("CartPoleNoVelocity-v1", f"{__name__}:CartPoleNoVelocity", max_episode_steps=500, reward_threshold=475.0)
