"""What a step holds, declared: name, shape and dtype of every entry. Rollouts and replays allocate from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.config import InputError
from rl_training.data.batch import tree_map
from rl_training.types import Field, Fields, Spaces, Step

FLAG = Field((), np.dtype(bool))
NUMBER = Field((), np.dtype(np.float32))


def field_of(space: gym.Space) -> Any:
    """The field of a space as the model sees it; of a Dict, a dict of fields."""
    if isinstance(space, gym.spaces.Dict):
        return {key: field_of(part) for key, part in space.spaces.items()}
    whole = isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
    return Field(space.shape or (), np.dtype(np.int64) if whole else np.dtype(space.dtype))


def step_fields(spaces: Spaces, extras: Mapping[str, Field]) -> Fields:
    """The entries of a step that are stored: those of every step, and an algorithm's extras."""
    return {
        "obs": field_of(spaces.observation),
        "first": FLAG,
        "action": field_of(spaces.action),
        "reward": NUMBER,
        "terminated": FLAG,
        "truncated": FLAG,
        **extras,
    }


def fields_of(step: Step) -> Fields:
    """The entries that `step` holds, as if they had been declared."""
    stored = {key: value for key, value in step.items() if key != "live" and not key.startswith("next_")}
    fields: Fields = tree_map(lambda x: Field(x.shape[1:], x.dtype), stored)
    return fields


def check_entries(step: Step, fields: Fields) -> None:
    """An entry that is missing or was not declared is an error: it would be lost, or stay as it was a round ago."""
    entries = {key for key in step if key != "live" and not key.startswith("next_")}
    if entries == fields.keys():
        return
    declared = f"declared are {', '.join(sorted(fields))}"
    if missing := sorted(fields.keys() - entries):
        raise InputError(f"a step lacks {', '.join(map(repr, missing))} ({declared}): every step holds all of them")
    unknown = ", ".join(map(repr, sorted(entries - fields.keys())))
    raise InputError(f"a step holds {unknown}, not declared ({declared}): name it in the recipe's fields")


def check_shapes(step: Step, fields: Fields, num_envs: int) -> None:
    """Every entry has a row for each environment, of the shape that was declared."""
    for path, declared in leaves(fields):
        value: Any = step
        for key in path:
            value = value[key]
        if np.shape(value) != (num_envs, *declared.shape):
            expected = (num_envs, *declared.shape)
            raise InputError(f"the step's {'.'.join(path)!r} has shape {np.shape(value)}, declared is {expected}")


def leaves(fields: Fields, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Field]]:
    """Every field, and the keys that lead to it."""
    for key, field in fields.items():
        if isinstance(field, dict):
            yield from leaves(field, (*path, key))
        else:
            yield (*path, key), field


def num_bytes(fields: Fields) -> int:
    """Of one row of every field."""
    return sum(math.prod(field.shape) * field.dtype.itemsize for _, field in leaves(fields))
