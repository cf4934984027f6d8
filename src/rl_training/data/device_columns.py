"""Columns of a replay on a device, where a learner reads and overwrites them without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import upload
from rl_training.data.ring import Holds
from rl_training.types import Array


class DeviceColumns:
    """Tensors [places, ...] that take the place of arrays. What `put` writes is in the arrays after `fetch` only."""

    def __init__(self, columns: Mapping[str, Array], device: torch.device) -> None:
        self.arrays, self.device = columns, device
        self.tensors = {name: torch.from_numpy(column).to(device, copy=True) for name, column in columns.items()}
        self.newer = np.zeros(len(next(iter(columns.values()))), bool)  # [places] whether tensors are newer than arrays

    def read(self, name: str, place: Array) -> Tensor:
        """[..., ...] The entries of a column at places [...]."""
        return self.tensors[name][self.index(place)]

    def refresh(self, place: Array) -> None:
        """Copy places [B] of the arrays, which a new step has overwritten."""
        index = self.index(place)
        for name, tensor in self.tensors.items():
            tensor[index] = upload(self.arrays[name][place], self.device)
        self.newer[place] = False

    def reload(self) -> None:
        """Copy all of the arrays."""
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.from_numpy(self.arrays[name]))
        self.newer[:] = False

    def put(self, place: Array, columns: Mapping[str, Array | Tensor]) -> None:
        """Overwrite entries [..., ...] at places [...]. Where a place is given twice, the last entry counts."""
        values = {name: torch.as_tensor(value, device=self.device) for name, value in columns.items()}
        unique, last = np.unique(place.reshape(-1)[::-1], return_index=True)
        if len(unique) < place.size:  # a device writes in any order, and another one for each column
            rows = self.index(place.size - 1 - last)
            values = {name: value.flatten(0, place.ndim - 1)[rows] for name, value in values.items()}
            place = unique
        index = self.index(place)
        for name, value in values.items():
            self.tensors[name][index] = value
        self.newer[place] = True

    def fetch(self, holds: Holds) -> None:
        """Copy what `put` has written to the arrays."""
        place = np.flatnonzero(self.newer)
        if place.size:
            holds.wait(place)
            index = self.index(place)
            for name, tensor in self.tensors.items():
                self.arrays[name][place] = tensor[index].cpu().numpy()
            self.newer[place] = False

    def index(self, place: Array) -> Tensor:
        index: Tensor = upload(np.ascontiguousarray(place), self.device)
        return index
