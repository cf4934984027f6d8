"""Experience of one policy, [T, N]: written in numpy, read as tensors that share its memory, then overwritten."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import tree_map
from rl_training.data.fields import check_entries, check_shapes, fields_of
from rl_training.types import Array, Batch, Field, Fields, Step


class Rollout:
    """`num_steps` transitions of each of `num_envs` environments.

    Where an episode goes on, what step t led to is what step t + 1 started from. So of the `next_*` entries of a step
    only the rows are kept that a bootstrap needs and nothing else holds, `ends`: truncated episodes and the last step.
    """

    def __init__(self, num_steps: int, num_envs: int, fields: Fields | None = None) -> None:
        """fields: what every step holds; None: what the first one does."""
        self.num_steps, self.num_envs, self.fields = num_steps, num_envs, fields
        self._entries: tuple[str, ...] = ()  # of the last step, which were those declared
        self.arrays: dict[str, Any] = {}  # [T, N, ...]
        self.batch: Batch = {}  # the same memory as tensors, valid until the rollout is written again
        self._columns: list[tuple[Array, tuple[str, ...]]] = []
        self.reset()

    def reset(self) -> None:
        """Forget the rows; the memory stays."""
        self._row = 0  # the cursor of all environments while none has had a dead row
        self._cursor: Array | None = None  # [N] each environment's own, from its first dead row on
        self._ends: list[tuple[Array, Array, dict[str, Any]]] = []

    @property
    def full(self) -> bool:
        """Whether every environment has its `num_steps` rows."""
        return (self._row if self._cursor is None else self._cursor.min()) >= self.num_steps

    def add(self, step: Step) -> None:
        """Append the live rows of one step; rows of environments that are full are dropped."""
        if self.fields is None:
            self.fields = fields_of(step)
        if tuple(step) != self._entries:
            check_entries(step, self.fields)
            self._entries = tuple(step)
        if not self._columns:
            check_shapes(step, self.fields, self.num_envs)
            self._allocate(self.fields)
        if self._cursor is None and "live" not in step:
            self._add_all(step)
        else:
            self._add_live(step)

    def _add_all(self, step: Step) -> None:
        t = self._row
        if t >= self.num_steps:
            return
        for array, path in self._columns:
            array[t] = _leaf(step, path)
        self._row = t + 1
        if t + 1 == self.num_steps or step["truncated"].any():
            ended = ~step["terminated"] if t + 1 == self.num_steps else step["truncated"] & ~step["terminated"]
            rows = np.flatnonzero(ended)
            self._keep_ends(step, np.full(len(rows), t), rows)

    def _add_live(self, step: Step) -> None:
        if self._cursor is None:
            self._cursor = np.full(self.num_envs, self._row)
        wanted = self._cursor < self.num_steps
        rows = np.flatnonzero(wanted & step["live"] if "live" in step else wanted)
        time = self._cursor[rows]
        for array, path in self._columns:
            array[time, rows] = _leaf(step, path)[rows]
        self._cursor[rows] += 1
        ended = (step["truncated"][rows] | (time + 1 == self.num_steps)) & ~step["terminated"][rows]
        self._keep_ends(step, time[ended], rows[ended])

    def _keep_ends(self, step: Step, time: Array, rows: Array) -> None:
        if len(rows):
            after = {key[5:]: tree_map(lambda x: x[rows], x) for key, x in step.items() if key.startswith("next_")}
            self._ends.append((time, rows, after))

    def ends(self) -> tuple[Array, Array, Batch]:
        """(time [M], env [M], what came after those steps: tensors [M, ...] without the prefix `next_`)."""
        if not self._ends:
            return np.empty(0, np.int64), np.empty(0, np.int64), {}
        times, envs, after = zip(*self._ends, strict=True)
        return np.concatenate(times), np.concatenate(envs), _concatenate(after)

    def next_value(self, value: Tensor, end_value: Tensor) -> Tensor:
        """[T, N] values of what each step led to, from those of where it started and those of `ends` [M].

        Meaningless where the episode terminated: there is no next state.
        """
        next_value = torch.zeros_like(value)
        next_value[:-1] = value[1:]
        time, env, _ = self.ends()
        place = torch.from_numpy(time * self.num_envs + env).to(value.device, non_blocking=True)
        next_value.view(-1)[place] = end_value
        return next_value

    def _allocate(self, fields: Fields) -> None:
        def column(path: tuple[str, ...], field: Any) -> Any:
            if isinstance(field, dict):
                return {key: column((*path, key), leaf) for key, leaf in field.items()}
            assert isinstance(field, Field)
            array = np.zeros((self.num_steps, self.num_envs, *field.shape), field.dtype)
            self._columns.append((array, path))
            return array

        self.arrays = {key: column((key,), field) for key, field in fields.items()}
        self.batch = tree_map(torch.from_numpy, self.arrays)


def _leaf(step: Step, path: tuple[str, ...]) -> Array:
    x: Any = step[path[0]]
    return cast(Array, x if len(path) == 1 else x[path[1]])


def _concatenate(trees: tuple[Any, ...]) -> Any:
    if isinstance(trees[0], dict):
        return {key: _concatenate(tuple(tree[key] for tree in trees)) for key in trees[0]}
    return torch.from_numpy(np.concatenate(trees))
