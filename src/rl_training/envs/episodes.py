"""Episodes that can be found again: each has its own seed, so its number and actions are all there is to save."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.config import InputError
from rl_training.envs.checks import EnvironmentFault, observation_problem, raised, reset_problem, step_problem
from rl_training.types import State

MAX_ACTIONS = 200_000  # longer histories are dropped: replaying them would take minutes
CHECKED_STEPS, CHECKED_RESETS = 20, 5  # the first ones, of which everything is checked; later ones: see BatchChecks


def episode_seed(seed: int, index: int, episode: int) -> int:
    """A seed of its own for every episode of every environment, whatever their number."""
    return int(np.random.SeedSequence((seed, index, episode)).generate_state(1)[0]) & 0x7FFFFFFF


def seed_process(seed: int) -> None:
    """Seed the process-wide generators of Python, NumPy and torch. We draw from none of them, environments may."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def num_players_of(env: Any) -> int:
    """2 where both sides of a game are played through the same environment, which then says so; else 1."""
    return 2 if getattr(env.unwrapped, "num_players", 1) == 2 else 1


def name_of(env: Any) -> str:
    """The id an environment is registered under, or its class."""
    return repr(env.spec.id) if env.spec is not None else type(env.unwrapped).__name__


class Episodes(gym.Wrapper):
    """Seeds every episode, remembers its actions, and checks what the environment returns.

    Any environment that draws its randomness from `reset(seed=...)` can be brought back by replaying them. Infos are
    dropped: nothing above reads them, and a process would have to send them. owns_process: no other environment draws
    from the generators of this process, so that an episode can seed them too.
    """

    def __init__(self, env: gym.Env, *, seed: int, index: int, owns_process: bool = False) -> None:
        super().__init__(env)
        self.seed = seed
        self.index = index
        self.owns_process = owns_process
        self.episode = -1
        self._copies = not isinstance(env.action_space, gym.spaces.Discrete)  # arrays may be reused by the caller
        self.actions: list[Any] | None = []  # since the reset; None: too many to keep
        self._unchecked, self._unchecked_resets = CHECKED_STEPS, CHECKED_RESETS
        space = env.observation_space
        self._shape = space.shape if isinstance(space, gym.spaces.Box) else None  # checked at every step: it is cheap

    @property
    def num_players(self) -> int:
        return num_players_of(self.env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.seed, self.episode = seed, -1
        return self._begin(self.episode + 1, options), {}

    def _begin(self, episode: int, options: dict[str, Any] | None = None) -> Any:
        self.episode, self.actions = episode, []
        seed = episode_seed(self.seed, self.index, episode)
        if self.owns_process:
            seed_process(seed)
        try:
            result = self.env.reset(seed=seed, options=options)
        except InputError:
            raise
        except Exception as error:
            raise raised(self._where(), "reset()", error) from error
        problem = reset_problem(result)
        if problem is None and (self._unchecked_resets or self._other_shape(result[0])):
            self._unchecked_resets = max(0, self._unchecked_resets - 1)
            problem = observation_problem(self.observation_space, result[0])
        if problem:
            raise EnvironmentFault(f"{self._where()}: {problem}")
        return result[0]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        actions = self.actions
        if actions is not None:
            actions.append(action.copy() if self._copies else action)
            if len(actions) > MAX_ACTIONS:
                self.actions = None
        try:
            obs, reward, terminated, truncated, _ = self.env.step(action)
        except InputError:
            raise
        except Exception as error:
            raise raised(self._where(), "step()", error) from error
        if self._unchecked:
            self._unchecked -= 1
            problem = step_problem(reward, terminated, truncated) or observation_problem(self.observation_space, obs)
            if problem:
                raise EnvironmentFault(f"{self._where()}: {problem}")
        elif self._other_shape(obs) and (problem := observation_problem(self.observation_space, obs)):
            raise EnvironmentFault(f"{self._where()}: {problem}")
        return obs, reward, terminated, truncated, {}

    def _other_shape(self, obs: Any) -> bool:
        """Whether an observation may have another shape than its space: it would be broadcast where it is stored."""
        return self._shape is not None and getattr(obs, "shape", None) != self._shape

    def _where(self) -> str:
        steps = f"{len(self.actions)}" if self.actions is not None else f"{MAX_ACTIONS} or later"
        when = "the beginning" if steps == "0" else f"step {steps}"
        return f"environment {name_of(self.env)}, number {self.index}, at {when} of its episode {self.episode}"

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
