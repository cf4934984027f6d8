"""Atari games one by one (Machado et al., 2018; the preprocessing of Mnih et al., 2015).

The vectorised emulator in `ale_py` is the fast path; this is the slow one, for what it cannot express. FIRE is pressed
after a reset of the game, not after a lost life: the game goes on there, and so training and evaluation agree.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.utils import seeding

from rl_training.config import AtariOptions
from rl_training.types import State


class QuickSeed(gym.Wrapper):
    """Seed a game by its NumPy generator alone.

    Seeding the emulator reloads the ROM (measured: 168 ms, a reset 5 ms). Without sticky actions the emulator draws
    nothing, and the number of no-ops comes from NumPy.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.unwrapped.np_random = seeding.np_random(seed)[0]
        return self.env.reset(options=options)


class FireReset(gym.Wrapper):
    """Press FIRE to start the game."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.fire = action_meanings(env).index("FIRE")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        obs, _, terminated, truncated, info = self.env.step(self.fire)
        return self.env.reset(options=options) if terminated or truncated else (obs, info)


class EpisodicLife(gym.Wrapper):
    """A lost life ends the episode; the game goes on from there at the next `reset`.

    Stands outside `Episodes`, whose unit is the game. `info["episode_over"]` is False where only a life was lost.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.lives = 0
        self.goes_on: Any = None  # the observation to go on from after a lost life

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, self.goes_on = self.goes_on, None
        if obs is not None and seed is None:
            return obs, {}
        result = self.env.reset(seed=seed, options=options)
        self.lives = self._lives()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        before, self.lives = self.lives, self._lives()
        # Some games show zero lives for a few frames before they are over; the true end follows.
        if 0 < self.lives < before and not (terminated or truncated):
            self.goes_on = obs
            return obs, reward, True, False, {"episode_over": False}
        return obs, reward, terminated, truncated, info

    def restore(self, states: list[State]) -> Any:
        self.goes_on = None
        obs = self.env.restore(states)  # type: ignore[attr-defined]
        self.lives = self._lives()
        return obs

    def _lives(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]


def action_meanings(env: gym.Env) -> list[str]:
    return list(env.unwrapped.get_action_meanings())  # type: ignore[attr-defined]


def preprocess(env: gym.Env, options: AtariOptions) -> gym.Env:
    """No-ops, frame skip with max-pooling, warping and FIRE around a game made with frameskip=1."""
    if options.sticky == 0:
        env = QuickSeed(env)
    env = gym.wrappers.AtariPreprocessing(
        env,
        noop_max=options.noop_max,
        frame_skip=options.frame_skip,
        screen_size=options.screen_size,
        grayscale_obs=options.grayscale,
        terminal_on_life_loss=False,
    )
    return FireReset(env) if options.fire_reset and "FIRE" in action_meanings(env) else env
