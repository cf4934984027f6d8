"""What an environment gives, compared with what it declares: the error names environment, step, entry and value."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.config import InputError
from rl_training.types import Array

WHOLE = "iub"  # the kinds of dtypes that are whole numbers
RESET_GIVES = "reset() should return (observation, info)"
STEP_GIVES = "step() should return (observation, reward, terminated, truncated, info)"


class EnvironmentFault(InputError):
    """An environment returned what its spaces do not allow, raised an error, or did not answer.

    The error that it raised, where it did, is the cause. `trace` is that one's traceback, which survives the way from
    another process.
    """

    trace: str = ""


class RemoteError(Exception):
    """Stands for an error in another process: shows its traceback where the error itself cannot be sent."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raised(where: str, call: str, error: Exception) -> EnvironmentFault:
    """The fault of an environment in whose `call` an error was raised; to be raised from it."""
    gives = {"reset()": RESET_GIVES, "step()": STEP_GIVES}.get(call)
    hint = f"; {gives}" if gives and isinstance(error, ValueError) and "to unpack" in str(error) else ""
    fault = EnvironmentFault(f"{where}: {call} raised {type(error).__name__}: {error}{hint}")
    fault.trace = "".join(traceback.format_exception(error))
    return fault


def reset_problem(result: Any) -> str | None:
    """What is wrong with the form of what `reset` returned; None if nothing."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return None
    return f"{RESET_GIVES}, got {described(result)}"


def step_problem(reward: Any, terminated: Any, truncated: Any) -> str | None:
    """What is wrong with the numbers of a step; None if nothing."""
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
    """What makes `obs` no element of its space, its bounds aside; None if nothing. Infinite bounds are fine, infinite
    values are not."""
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
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and not within(space, value - space.start):
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


def within(space: spaces.Discrete | spaces.MultiDiscrete, value: Array) -> bool:
    """Whether whole numbers, counted from 0, are among those of the space."""
    count = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return bool(((value >= 0) & (value < count)).all())


def described(value: Any) -> str:
    """Of what kind a value is, and the value where it is short."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{shown(value)} ({type(value).__name__})"


def shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
    return text if len(text) <= 80 else text[:77] + "..."


class BatchChecks:
    """Looks through observations [N, ...] and rewards [N] at every step, in little time: finite, and in range."""

    def __init__(self, space: gym.Space, num_envs: int) -> None:
        """space: as the model sees it."""
        self.num_envs = num_envs
        self.parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        counts = (spaces.Discrete, spaces.MultiDiscrete)
        self.counted = {key: part for key, part in self.parts.items() if isinstance(part, counts)}
        boxes = {key: part for key, part in self.parts.items() if isinstance(part, spaces.Box)}
        self.floats = [key for key, part in boxes.items() if np.issubdtype(part.dtype, np.floating)]

    def passes(self, reward: Array, obs: Any) -> bool:
        """Whether all rewards [N] and observations [N, ...] are good; `problem` then says which is not."""
        if not all_finite(reward):
            return False
        for key in self.floats:
            if not all_finite(obs[key] if key else obs):
                return False
        return not self.counted or all(within(space, obs[key] if key else obs) for key, space in self.counted.items())

    def problem(self, reward: Array, obs: Any) -> tuple[int, str]:
        """(environment, what is wrong with what it gave) of rewards and observations that do not pass."""
        if not all_finite(reward):
            env = int(np.flatnonzero(~np.isfinite(reward))[0])
            return env, f"the reward is {reward[env]}"
        for key in self.floats:
            value = obs[key] if key else obs
            if not all_finite(value):
                return self._first(key, value, ~np.isfinite(value), "not finite")
        for key, space in self.counted.items():
            value = obs[key] if key else obs
            if not within(space, value):
                count = space.n if isinstance(space, spaces.Discrete) else space.nvec
                return self._first(key, value, (value < 0) | (value >= count), "out of range")
        raise AssertionError("nothing is wrong with these")

    def _first(self, key: str, value: Array, wrong: Array, how: str) -> tuple[int, str]:
        env = int(np.flatnonzero(wrong.reshape(self.num_envs, -1).any(1))[0])
        name = f"observation {key!r}" if key else "the observation"
        return env, f"{name} is {how}: {shown(value[env])}"

    def shape_problem(self, obs: Any, **numbers: Array) -> str | None:
        """What is wrong with the shapes of a batch; None if nothing is."""
        for key, space in self.parts.items():
            expected, got = (self.num_envs, *(space.shape or ())), np.shape(obs[key] if key else obs)
            if got != expected:
                name = f"observations {key!r}" if key else "the observations"
                return f"{name} should have shape {expected}, got {got}"
        for name, value in numbers.items():
            if np.shape(value) != (self.num_envs,):
                return f"{name} should have shape {(self.num_envs,)}, got {np.shape(value)}"
            if name != "reward" and np.asarray(value).dtype != bool:
                return f"{name} should be bools, got dtype {np.asarray(value).dtype}"
        return None


def all_finite(values: Any) -> bool:
    """Whether an array has neither NaN nor infinity (measured for [8, 4]: 0.3 microseconds, by .all() 1.3)."""
    return 0 not in np.isfinite(values).tobytes()
