"""Episodes that can be found again: each has its own seed, so its number and actions are all there is to save."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.types import State

MAX_ACTIONS = 200_000  # longer histories are dropped: replaying them would take minutes


def episode_seed(seed: int, index: int, episode: int) -> int:
    """A seed of its own for every episode of every environment, whatever their number."""
    return int(np.random.SeedSequence((seed, index, episode)).generate_state(1)[0]) & 0x7FFFFFFF


def num_players_of(env: Any) -> int:
    """2 where both sides of a game are played through the same environment, which then says so; else 1."""
    return 2 if getattr(env.unwrapped, "num_players", 1) == 2 else 1


class Episodes(gym.Wrapper):
    """Seeds every episode and remembers its actions.

    Any environment that draws its randomness from `reset(seed=...)` can be brought back by replaying them. Infos are
    dropped: nothing above reads them, and a process would have to send them.
    """

    def __init__(self, env: gym.Env, *, seed: int, index: int) -> None:
        super().__init__(env)
        self.seed = seed
        self.index = index
        self.episode = -1
        self._copies = not isinstance(env.action_space, gym.spaces.Discrete)  # arrays may be reused by the caller
        self.actions: list[Any] | None = []  # since the reset; None: too many to keep

    @property
    def num_players(self) -> int:
        return num_players_of(self.env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.seed, self.episode = seed, -1
        return self._begin(self.episode + 1, options), {}

    def _begin(self, episode: int, options: dict[str, Any] | None = None) -> Any:
        self.episode = episode
        self.actions = []
        return self.env.reset(seed=episode_seed(self.seed, self.index, episode), options=options)[0]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        actions = self.actions
        if actions is not None:
            actions.append(action.copy() if self._copies else action)
            if len(actions) > MAX_ACTIONS:
                self.actions = None
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, reward, terminated, truncated, {}

    def state(self) -> State:
        actions = None if self.actions is None else np.asarray(self.actions)
        return {"seed": self.seed, "episode": self.episode, "actions": actions}

    def restore(self, states: list[State]) -> Any:
        """Replay this environment's saved episode and return its last observation; None where that is impossible.

        Takes the states of all environments and picks its own: an AsyncVectorEnv sends the same to all.
        """
        state = states[self.index]
        self.seed, self.episode = int(state["seed"]), int(state["episode"])
        if state["actions"] is None:
            return None
        obs = self._begin(self.episode)
        actions = state["actions"]
        for number, action in enumerate(actions, 1):
            obs, _, terminated, truncated, _ = self.step(action)
            if (terminated or truncated) and number < len(actions):
                return None
        return obs
