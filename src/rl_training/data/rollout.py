"""The transitions of one policy over T steps, written as NumPy arrays and read as tensors that share their memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import rows_of, tree_map
from rl_training.data.fields import check_step, leaves
from rl_training.data.recurrent import select_rows
from rl_training.types import Array, Batch, Fields, Memory, Step


class Rollout:
    """`num_steps` transitions of each of `num_envs` environments.

    Within an episode the next observation of step t is the observation of step t + 1, so it is not stored twice. The
    rollout keeps `next_obs` and `next_memory` only at its `ends`, where a bootstrap needs them.
    """

    def __init__(self, num_steps: int, num_envs: int, fields: Fields, arrays: Batch | None = None) -> None:
        """fields: the stored entries of every step. arrays: where to store them [T, N, ...], instead of new memory."""
        self.num_steps, self.num_envs, self.fields = num_steps, num_envs, fields
        self._entries: tuple[str, ...] = ()  # of the last step
        self.arrays: Batch = arrays or tree_map(lambda f: np.zeros((num_steps, num_envs, *f.shape), f.dtype), fields)
        self.batch: Batch = tree_map(torch.from_numpy, self.arrays)  # the same arrays [T, N, ...] as tensors
        self._columns = [(_leaf(self.arrays, path), path) for path, _ in leaves(fields)]
        self.reset()

    def reset(self) -> None:
        """Begin a new rollout in the same arrays."""
        self._row = 0  # the next row of all environments, until a step has rows that are not live
        self._cursor: Array | None = None  # [N] from then on, the next row of each environment
        self._ends: list[tuple[Array, Array, dict[str, Any]]] = []
        self.start_memory: dict[str, Tensor] = {}  # [N, ...] before the first rows; {}: a memoryless policy

    @property
    def full(self) -> bool:
        """Whether every environment has its `num_steps` rows."""
        return (self._row if self._cursor is None else self._cursor.min()) >= self.num_steps

    def add(self, step: Step) -> None:
        """Append the live rows of one step. Rows of environments that are full are dropped."""
        if tuple(step) != self._entries:  # the first step, or one that is made in another way
            self._entries = check_step(step, self.fields, self.num_envs)
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
        if t == 0 and "memory" in step:
            self._keep_start(step["memory"], np.arange(self.num_envs))
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
        if "memory" in step:
            self._keep_start(step["memory"], rows[time == 0])
        ended = (step["truncated"][rows] | (time + 1 == self.num_steps)) & ~step["terminated"][rows]
        self._keep_ends(step, time[ended], rows[ended])

    def _keep_start(self, memory: Memory, rows: Array) -> None:
        if len(rows):
            for key, value in select_rows(memory, rows).items():
                tensor = torch.as_tensor(value).detach()
                start = self.start_memory.setdefault(key, tensor.new_zeros(self.num_envs, *tensor.shape[1:]))
                start[torch.from_numpy(rows)] = tensor.to(start.device)

    def _keep_ends(self, step: Step, time: Array, rows: Array) -> None:
        if len(rows):
            after = {key[5:]: rows_of(x, rows) for key, x in step.items() if key.startswith("next_")}
            self._ends.append((time, rows, after))

    def ends(self) -> tuple[Array, Array, Batch]:
        """(time [M], env [M], what followed: tensors [M, ...] of the `next_*` entries, without the prefix).

        These are the steps whose episode was truncated, and the last step of each environment. Where the episode
        terminated, neither needs a bootstrap: they are left out.
        """
        if not self._ends:
            return np.empty(0, np.int64), np.empty(0, np.int64), {}
        times, envs, after = zip(*self._ends, strict=True)
        return np.concatenate(times), np.concatenate(envs), _concatenate(after)

    def next_value(self, value: Tensor, end_value: Tensor) -> Tensor:
        """[T, N] values of the next observations, from the values [T, N] of the observations and those [M] of `ends`.

        They are meaningless where an episode terminated: there is no next state.
        """
        next_value = torch.zeros_like(value)
        next_value[:-1] = value[1:]
        time, env, _ = self.ends()
        place = torch.from_numpy(time * self.num_envs + env).to(value.device, non_blocking=True)
        next_value.view(-1)[place] = end_value
        return next_value


def _leaf(step: Step, path: tuple[str, ...]) -> Array:
    x: Any = step[path[0]]
    return cast(Array, x if len(path) == 1 else x[path[1]])


def _concatenate(trees: tuple[Any, ...]) -> Any:
    if isinstance(trees[0], dict):
        return {key: _concatenate(tuple(tree[key] for tree in trees)) for key in trees[0]}
    return torch.cat([torch.as_tensor(tree).detach() for tree in trees])
