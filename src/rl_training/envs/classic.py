"""Variants of Gymnasium's classic control tasks."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from rl_training.types import Array

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


gym.register("CartPoleFixedHorizon-v0", f"{__name__}:{CartPoleFixedHorizon.__name__}", max_episode_steps=500)
