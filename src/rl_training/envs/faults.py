"""What is wrong with the values that an environment returned, and the error that says so."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rl_training.errors import InputError
from rl_training.types import Array

WHOLE = "iub"  # the dtype kinds of whole numbers
RESET_GIVES = "reset() should return (observation, info)"
STEP_GIVES = "step() should return (observation, reward, terminated, truncated, info)"


class EnvironmentFault(InputError):
    """An environment returned an invalid value, raised an error, or did not answer.

    An error that the environment raised is the cause of this one. `trace` is its traceback as text, because a
    traceback itself cannot be sent from another process.
    """

    trace: str = ""
    between_updates = False  # whether the learner is between two updates then, in a state that is worth saving


def raised(where: str, call: str, error: Exception) -> EnvironmentFault:
    """The fault to raise from `error`, which an environment raised in `call`."""
    gives = {"reset()": RESET_GIVES, "step()": STEP_GIVES}.get(call)
    hint = f"; {gives}" if gives and isinstance(error, ValueError) and "to unpack" in str(error) else ""
    fault = EnvironmentFault(f"{where}: {call} raised {type(error).__name__}: {error}{hint}")
    fault.trace = "".join(traceback.format_exception(error))
    return fault


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


def observation_problem(space: Space, obs: Any, key: str = "") -> str | None:
    """Why `obs` does not belong to its space, the bounds of a Box aside; None if it does. NaN and infinity do not."""
    name = observation_name(key)
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


def observation_name(key: str) -> str:
    """The observation, or its part `key`, in the words of an error."""
    return f"observation {key!r}" if key else "the observation"


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
