"""Preprocessing of single Atari games (Mnih et al., 2015; Machado et al., 2018), and episodes that end with a life.

The vectorised emulator of `ale_py` is faster. These wrappers are for options that it does not have. FIRE is pressed
after a reset of the game only: a lost life continues the game, in training as in evaluation.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from rl_training.config import AtariOptions
from rl_training.types import Array, State


class QuickSeed(gym.Wrapper):
    """Seeds only the NumPy generator of a game, which draws the number of no-ops.

    Seeding the emulator would reload the ROM (measured: 168 ms, a reset 5 ms). Without sticky actions the emulator is
    deterministic.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.unwrapped.np_random = seeding.np_random(seed)[0]
        return self.env.reset(options=options)


class FireReset(gym.Wrapper):
    """Presses FIRE after a reset to start the game."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.fire = action_meanings(env).index("FIRE")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        obs, _, terminated, truncated, info = self.env.step(self.fire)
        return self.env.reset(options=options) if terminated or truncated else (obs, info)


class EpisodicLife(gym.Wrapper):
    """Ends the episode where a life is lost. The next `reset` then continues the same game.

    It wraps `Episodes`, which count whole games. `info["episode_over"]` is False where only a life was lost.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.lives = 0
        self.goes_on: Any = None  # the observation after a lost life, which the next `reset` returns

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
        # Some games show zero lives for a few frames before they are over: the end follows by itself.
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


class LifeCounter:
    """Finds lost lives in a batch of games: `EpisodicLife` for vectorised emulators.

    The option of ale_py itself is not used: it resets the whole game, so only the first life would ever be played.
    """

    def __init__(self, num_envs: int) -> None:
        self.lives = np.zeros(num_envs, np.int64)

    def lost(self, lives: Array, over: Array) -> Array:
        """[N] Which games continue after a lost life, from the lives left [N] and the games that are over [N]."""
        lost: Array = (lives > 0) & (lives < self.lives) & ~over  # zero lives: as in EpisodicLife
        self.lives = np.array(lives, np.int64)
        return lost


def action_meanings(env: gym.Env) -> list[str]:
    return list(env.unwrapped.get_action_meanings())  # type: ignore[attr-defined]


def preprocess(env: gym.Env, options: AtariOptions) -> gym.Env:
    """Wrap a game made with frameskip=1: no-ops, frame skip with max-pooling, resizing and FIRE."""
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
