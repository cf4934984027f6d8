"""Variants of Gymnasium's classic control tasks."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from rl_training.types import Array

SEEN = np.array([1, 0, 1, 0], np.float32)  # position, velocity, angle, angular velocity
MAX_ANGULAR_VELOCITY = 10.0  # radians per second; a pole that falls freely reaches 8


class CartPoleFixedHorizon(CartPoleEnv):
    """Cart-pole whose episodes never terminate: their length tells a learner nothing about success.

    A step earns 1 while the pole is upright and the cart on the track, else 0. After a fall the pole swings on, and the
    cart stops at the ends of a track twice as long.
    """

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.end_of_track = 2 * self.x_threshold
        high = np.array([self.end_of_track, np.inf, math.pi, MAX_ANGULAR_VELOCITY], np.float32)
        self.observation_space = gym.spaces.Box(-high, high, dtype=np.float32)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.steps_beyond_terminated = None  # else the parent warns that the episode is over
        _, _, fallen, _, info = super().step(action)  # type: ignore[no-untyped-call]
        assert self.state is not None
        x, x_dot, theta, theta_dot = self.state
        if abs(x) > self.end_of_track:
            x, x_dot = math.copysign(self.end_of_track, x), 0.0
        theta = math.remainder(theta, 2 * math.pi)
        theta_dot = min(max(theta_dot, -MAX_ANGULAR_VELOCITY), MAX_ANGULAR_VELOCITY)
        self.state = np.array((x, x_dot, theta, theta_dot))
        return self.state.astype(np.float32), float(not fallen), False, False, info


class CartPoleNoVelocity(CartPoleEnv):
    """Cart-pole whose observations hide the velocities: a policy has to remember earlier positions.

    As in rl-zoo the velocities are zero, not left out, so that networks are of the same size with and without them.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs * SEEN, info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return obs * SEEN, reward, terminated, truncated, info


gym.register("CartPoleFixedHorizon-v0", f"{__name__}:{CartPoleFixedHorizon.__name__}", max_episode_steps=500)
gym.register(
    "CartPoleNoVelocity-v1", f"{__name__}:{CartPoleNoVelocity.__name__}", max_episode_steps=500, reward_threshold=475.0
)
