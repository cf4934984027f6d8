"""Rollouts of some of the environments, and how they become one rollout of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_training.data.batch import rows_of, tree_map
from rl_training.data.recurrent import on_cpu, select_rows
from rl_training.data.rollout import Rollout
from rl_training.types import Array, Batch, Field, Fields, Memory


class RolloutPart(NamedTuple):
    """A rollout [T, n, ...] as arrays, which may lie in memory that is written again later."""

    arrays: Batch
    start_memory: Memory  # [n, ...]
    ends: tuple[Array, Array, Batch]  # see Rollout.ends


def part_fields(num_steps: int, num_envs: int, fields: Fields, memory: Fields) -> Fields:
    """The arrays of a part, for `write_part`; memory: the fields of a row of recurrent memory.

    There is room for an end at every step, of which few are used: where pages are allocated when they are written, the
    others take no memory.
    """
    most = num_steps * num_envs
    after = {"obs": fields["obs"], **({"memory": memory} if memory else {})}
    return {
        "arrays": _with_axes(fields, num_steps, num_envs),
        "start_memory": _with_axes(memory, num_envs),
        "end_time": Field((most,), np.dtype(np.int64)),
        "end_env": Field((most,), np.dtype(np.int64)),
        "after": _with_axes(after, most),
    }


def _with_axes(fields: Fields, *axes: int) -> Fields:
    longer: Fields = tree_map(lambda field: Field((*axes, *field.shape), field.dtype), fields)
    return longer


def write_part(rollout: Rollout, target: Batch) -> int:
    """Write what a rollout holds beside its arrays, and return the number of its ends."""
    time, env, after = rollout.ends()
    for key, value in rollout.start_memory.items():
        target["start_memory"][key][:] = value.cpu().numpy()
    target["end_time"][: len(time)], target["end_env"][: len(time)] = time, env
    if after:
        _copy_rows(target["after"], after, len(time))
    return len(time)


def read_part(source: Batch, num_ends: int) -> RolloutPart:
    """The part that was written, without copying."""
    after = rows_of(source["after"], slice(num_ends)) if num_ends else {}
    ends = source["end_time"][:num_ends], source["end_env"][:num_ends], after
    return RolloutPart(source["arrays"], source["start_memory"], ends)


def part_of(rollout: Rollout) -> RolloutPart:
    """A rollout as a part."""
    time, env, after = rollout.ends()
    start: Memory = {key: value.cpu().numpy() for key, value in rollout.start_memory.items()}
    return RolloutPart(rollout.arrays, start, (time, env, tree_map(lambda x: x.cpu().numpy(), after)))


def _copy_rows(target: Any, source: Any, count: int) -> None:
    if isinstance(target, dict):
        for key, entry in target.items():
            _copy_rows(entry, source[key], count)
    else:
        target[:count] = source.cpu().numpy() if isinstance(source, torch.Tensor) else source


class JoinedRollout(Rollout):
    """A rollout of all environments, from one part for each group of them."""

    def join(self, parts: Sequence[RolloutPart]) -> None:
        """Copy the parts side by side, [T, n, ...] each: the rows of all environments in the order of the parts."""
        self.reset()
        self._row, begin = self.num_steps, 0
        for part in parts:
            rows = np.arange(begin, begin + part.arrays["reward"].shape[1])
            _copy_columns(self.arrays, part.arrays, slice(begin, begin + len(rows)))
            begin += len(rows)
            for key, value in part.start_memory.items():
                tensor = torch.from_numpy(np.array(value))
                start = self.start_memory.setdefault(key, tensor.new_zeros(self.num_envs, *value.shape[1:]))
                start[torch.from_numpy(rows)] = tensor
            time, env, after = part.ends
            if len(time):
                self._ends.append((time.copy(), rows[env], tree_map(lambda x: x.copy(), after)))


def _copy_columns(target: Any, source: Any, columns: slice) -> None:
    for key, entry in target.items():
        if isinstance(entry, dict):
            _copy_columns(entry, source[key], columns)
        else:
            entry[:, columns] = source[key]


def memory_fields(memory: Memory) -> Fields:
    """The fields of a row of recurrent memory [N, ...]."""
    arrays = {key: np.asarray(value) for key, value in on_cpu(select_rows(memory, np.arange(1))).items()}
    return {key: Field(value.shape[1:], value.dtype) for key, value in arrays.items()}
