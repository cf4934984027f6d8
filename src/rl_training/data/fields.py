"""The declared entries of a step: name, shape and dtype. Rollouts and replays allocate their arrays from these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.data.batch import tree_map
from rl_training.errors import InputError
from rl_training.types import Field, Fields, Spaces, Step

FLAG = Field((), np.dtype(bool))
NUMBER = Field((), np.dtype(np.float32))
COUNT = Field((), np.dtype(np.int64))
NO_COLUMNS = ("live", "memory")


def field_of(space: gym.Space) -> Any:
    """The field of a model's space; a dict of fields for a Dict space."""
    if isinstance(space, gym.spaces.Dict):
        return {key: field_of(part) for key, part in space.spaces.items()}
    whole = isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
    return Field(space.shape or (), np.dtype(np.int64) if whole else np.dtype(space.dtype))


def step_fields(spaces: Spaces, extras: Mapping[str, Field]) -> Fields:
    """The stored entries of a step: those of every algorithm, and the extras of this one."""
    return {
        "obs": field_of(spaces.observation),
        "first": FLAG,
        "action": field_of(spaces.action),
        "reward": NUMBER,
        "terminated": FLAG,
        "truncated": FLAG,
        **extras,
    }


def stored_entries(step: Step) -> Step:
    """The entries that become columns of a rollout or replay. `live`, `memory` and `next_*` do not."""
    return {key: value for key, value in step.items() if key not in NO_COLUMNS and not key.startswith("next_")}


def fields_of(step: Step) -> Fields:
    """The fields that declare exactly what `step` holds."""
    fields: Fields = tree_map(lambda x: Field(x.shape[1:], x.dtype), stored_entries(step))
    return fields


def check_step(step: Step, fields: Fields, num_envs: int) -> tuple[str, ...]:
    """The names of a step's entries, after a check that entries and shapes are as declared."""
    check_entries(step, fields)
    check_shapes(step, fields, num_envs)
    return tuple(step)


def check_entries(step: Step, fields: Fields) -> None:
    """Raise an InputError where an entry is missing or not declared. Its column would keep old values, or not exist."""
    entries = stored_entries(step).keys()
    if entries == fields.keys():
        return
    declared = f"declared are {', '.join(sorted(fields))}"
    if missing := sorted(fields.keys() - entries):
        raise InputError(f"a step lacks {', '.join(map(repr, missing))} ({declared}): every step holds all of them")
    unknown = ", ".join(map(repr, sorted(entries - fields.keys())))
    raise InputError(f"a step holds {unknown}, not declared ({declared}): name it in the recipe's fields")


def check_shapes(step: Step, fields: Fields, num_envs: int) -> None:
    """Raise an InputError where an entry does not have the declared shape, with a row for each environment."""
    for path, declared in leaves(fields):
        value: Any = step
        for key in path:
            value = value[key]
        if np.shape(value) != (num_envs, *declared.shape):
            expected = (num_envs, *declared.shape)
            raise InputError(f"the step's {'.'.join(path)!r} has shape {np.shape(value)}, declared is {expected}")


def leaves(fields: Fields, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Field]]:
    """(the keys that lead to a field, the field) of all fields."""
    for key, field in fields.items():
        if isinstance(field, dict):
            yield from leaves(field, (*path, key))
        else:
            yield (*path, key), field


def num_bytes(fields: Fields) -> int:
    """The bytes of one row of all fields."""
    return sum(math.prod(field.shape) * field.dtype.itemsize for _, field in leaves(fields))
