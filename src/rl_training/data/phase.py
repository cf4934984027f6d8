"""Observations and value targets of the rollouts since the last auxiliary phase."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import flatten, rows_of, tree_map
from rl_training.data.fields import NUMBER
from rl_training.data.state_check import StateMismatch, compare_state
from rl_training.errors import InputError
from rl_training.types import Batch, Fields, State


class Phase:
    """The samples [M, ...] of up to `num_rollouts` rollouts, in host memory, observations in their own dtype.

    The arrays are allocated when the first rollout shows its size.
    """

    def __init__(self, num_rollouts: int, obs: Fields) -> None:
        """obs: the field of an observation, or a dict of them."""
        self.num_rollouts, self.fields = num_rollouts, {"obs": obs, "target": NUMBER}
        self.count = 0  # rollouts that are stored
        self.arrays: Batch = self._allocate(0)
        self._size = 0  # samples of a rollout

    def _allocate(self, rows: int) -> Batch:
        batch: Batch = tree_map(lambda f: torch.from_numpy(np.zeros((rows, *f.shape), f.dtype)), self.fields)
        return batch

    @property
    def full(self) -> bool:
        return self.count == self.num_rollouts

    def add(self, batch: Batch) -> None:
        """Copy observations and targets [T, N, ...] of a rollout."""
        new = flatten({key: batch[key] for key in self.fields})
        if self.count and len(new["target"]) != self._size:
            rows = len(new["target"])
            raise InputError(f"a rollout of {rows} samples does not fit into a phase of rollouts of {self._size}")
        self._make_room(len(new["target"]))
        start = self.count * self._size
        _copy(rows_of(self.arrays, slice(start, start + self._size)), new)
        self.count += 1

    def _make_room(self, size: int) -> None:
        if size != self._size:
            self._size, self.arrays = size, self._allocate(self.num_rollouts * size)

    def clear(self) -> None:
        self.count = 0

    def samples(self) -> Batch:
        """All that is stored [M, ...], without copying."""
        stored: Batch = rows_of(self.arrays, slice(self.count * self._size))
        return stored

    def state_dict(self) -> State:
        return {"count": self.count, **self.samples()}

    def state_pattern(self) -> State:
        """The number of samples depends on the position in the phase; `load_state_dict` compares shapes."""
        return {"count": int, **tree_map(lambda _: Tensor, self.fields)}

    def load_state_dict(self, state: State) -> None:
        count, rows = state["count"], state["target"].numel()
        if count >= self.num_rollouts or (rows % count if count else rows):
            raise StateMismatch(f"phase: {rows} samples cannot be those of {count} rollouts of {self.num_rollouts}")
        self.count = count
        if count:
            self._make_room(rows // count)
        compare_state(self.state_dict(), state, "phase")
        _copy(self.samples(), {key: state[key] for key in self.fields})


def _copy(target: Batch, source: Batch) -> None:
    for key, entry in target.items():
        if isinstance(entry, dict):
            _copy(entry, source[key])
        else:
            entry.copy_(source[key])
