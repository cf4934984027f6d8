"""Actions that last for several steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from rl_training.config import InputError
from rl_training.envs.episodes import num_players_of


class ActionRepeat(gym.Wrapper):
    """Takes each action `times` times, or until the episode ends, for the sum of the rewards.

    What only a long push brings about is come upon by chance when a choice lasts; and an episode has fewer of them.
    """

    def __init__(self, env: gym.Env, times: int) -> None:
        super().__init__(env)
        if num_players_of(env) == 2:
            raise InputError(
                "wrappers.action_repeat would make the moves of both players: remove it, or give a game an opponent"
            )
        self.times = times

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info
