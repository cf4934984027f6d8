"""Wrappers of one environment: reproducible and checked episodes, repeated actions."""

from __future__ import annotations

import random
import traceback
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from rl_training.config import InputError
from rl_training.types import Array, State

MAX_ACTIONS = 200_000  # an episode with more actions is not restored: replaying it would take minutes
CHECKED_STEPS, CHECKED_RESETS = 20, 5  # fully checked at the start; later ones only by BatchChecks, which is fast
WHOLE = "iub"  # the dtype kinds of whole numbers
RESET_GIVES = "reset() should return (observation, info)"
STEP_GIVES = "step() should return (observation, reward, terminated, truncated, info)"


class EnvironmentFault(InputError):
    """An environment returned an invalid value, raised an error, or did not answer.

    An error that the environment raised is the cause of this one. `trace` is its traceback as text, because a
    traceback itself cannot be sent from another process.
    """

    trace: str = ""


def raised(where: str, call: str, error: Exception) -> EnvironmentFault:
    """The fault to raise from `error`, which an environment raised in `call`."""
    gives = {"reset()": RESET_GIVES, "step()": STEP_GIVES}.get(call)
    hint = f"; {gives}" if gives and isinstance(error, ValueError) and "to unpack" in str(error) else ""
    fault = EnvironmentFault(f"{where}: {call} raised {type(error).__name__}: {error}{hint}")
    fault.trace = "".join(traceback.format_exception(error))
    return fault


def episode_seed(seed: int, index: int, episode: int) -> int:
    """The seed of one episode of environment number `index`. It does not depend on the number of environments."""
    return int(np.random.SeedSequence((seed, index, episode)).generate_state(1)[0]) & 0x7FFFFFFF


def seed_process(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch. This package does not use them, environments may."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def num_players_of(env: Any) -> int:
    """2 where the environment declares that both players of a game act through it, else 1."""
    return 2 if getattr(env.unwrapped, "num_players", 1) == 2 else 1


class Episodes(gym.Wrapper):
    """Seeds every episode, records its actions, and checks what the environment returns.

    An episode is restored by replaying its actions. This works where all randomness comes from `reset(seed=...)`.
    Infos are dropped: nothing reads them, and a worker process would have to send them. With `owns_process` no other
    environment uses this process, so an episode seeds the global generators too.
    """

    def __init__(self, env: gym.Env, *, seed: int, index: int, owns_process: bool = False) -> None:
        super().__init__(env)
        self.seed = seed
        self.index = index
        self.owns_process = owns_process
        self.episode = -1
        self._copies = not isinstance(env.action_space, gym.spaces.Discrete)  # the caller may reuse an action array
        self.actions: list[Any] | None = []  # since the reset; None: more than MAX_ACTIONS
        self._unchecked, self._unchecked_resets = CHECKED_STEPS, CHECKED_RESETS
        space = env.observation_space
        self._shape = space.shape if isinstance(space, gym.spaces.Box) else None  # cheap to check at every step

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
        """Whether the shape may differ from the space's. Such an array would be broadcast where it is stored."""
        return self._shape is not None and getattr(obs, "shape", None) != self._shape

    def _where(self) -> str:
        name = repr(self.env.spec.id) if self.env.spec is not None else type(self.env.unwrapped).__name__
        steps = f"{len(self.actions)}" if self.actions is not None else f"{MAX_ACTIONS} or later"
        when = "the beginning" if steps == "0" else f"step {steps}"
        return f"environment {name}, number {self.index}, at {when} of its episode {self.episode}"

    def state(self) -> State:
        actions = None if self.actions is None else np.asarray(self.actions)
        return {"seed": self.seed, "episode": self.episode, "actions": actions}

    def restore(self, states: list[State]) -> Any:
        """Replay this environment's saved episode and return its last observation; None where that is impossible.

        `states` has an entry for every environment, because AsyncVectorEnv sends the same arguments to all.
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


class ActionRepeat(gym.Wrapper):
    """Repeats each action `times` times, or until the episode ends. The reward is the sum.

    Random exploration then reaches states that need the same action many times, and episodes have fewer steps.
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


def reset_problem(result: Any) -> str | None:
    """What is wrong with the return value of `reset`, its content aside; None if nothing is."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return None
    return f"{RESET_GIVES}, got {described(result)}"


def step_problem(reward: Any, terminated: Any, truncated: Any) -> str | None:
    """What is wrong with the reward and the flags of one step; None if nothing is."""
    number = np.asarray(reward)
    if number.shape != () or number.dtype.kind not in WHOLE + "f":
        return f"the reward should be a number, got {described(reward)}"
    if not np.isfinite(number):
        return f"the reward is {number}"
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if np.asarray(flag).shape != () or np.asarray(flag).dtype != bool:
            return f"{name} should be a bool, got {described(flag)}"
    return None


def observation_problem(space: gym.Space, obs: Any, key: str = "") -> str | None:
    """Why `obs` does not belong to its space, the bounds of a Box aside; None if it does. NaN and infinity do not."""
    name = f"observation {key!r}" if key else "the observation"
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _structure_problem(space, obs, key, name)
    try:
        value = np.asarray(obs)
    except ValueError:  # rows of different lengths
        return f"{name} should be an array of shape {space.shape or ()}, got {described(obs)}"
    if value.shape != (space.shape or ()):
        return f"{name} should have shape {space.shape or ()}, as its space has, got {described(obs)}"
    whole, floats = value.dtype.kind in WHOLE, value.dtype.kind == "f"
    takes_floats = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if not (whole or (floats and takes_floats)):
        return f"{name} should have dtype {space.dtype}, as its space has, got {described(obs)}"
    if floats and not np.isfinite(value).all():
        return f"{name} is not finite: {shown(value)}"
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and out_of_range(space, value - space.start).any():
        return f"{name} is not in {space}: {shown(value)}"
    return None


def _structure_problem(space: spaces.Dict | spaces.Tuple, obs: Any, key: str, name: str) -> str | None:
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping):
            return f"{name} should be a dict, as its space is, got {described(obs)}"
        if set(obs) != set(space.spaces):
            return f"{name} should have the keys {sorted(space.spaces)}, as its space has, got {sorted(map(str, obs))}"
        parts: Any = space.spaces.items()
    else:
        if not isinstance(obs, tuple | list) or len(obs) != len(space.spaces):
            return f"{name} should be a tuple of {len(space.spaces)}, as its space is, got {described(obs)}"
        parts = enumerate(space.spaces)
    problems = (observation_problem(part, obs[k], f"{key}.{k}" if key else str(k)) for k, part in parts)
    return next(filter(None, problems), None)


def out_of_range(space: spaces.Discrete | spaces.MultiDiscrete, value: Array) -> Array:
    """Which of the whole numbers [..., *shape], counted from 0, do not belong to the space."""
    wrong: Array = (value < 0) | (value >= (space.n if isinstance(space, spaces.Discrete) else space.nvec))
    return wrong


def described(value: Any) -> str:
    """The kind of a value, and the value itself where it is short."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{shown(value)} ({type(value).__name__})"


def shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
    return text if len(text) <= 80 else text[:77] + "..."
