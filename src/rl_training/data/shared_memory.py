"""Memory that processes share, and arrays in it.

It has no name: the system frees it with the last process that has it open, however that ends.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from functools import cached_property
from typing import Any

import numpy as np

from rl_training.data.batch import tree_map
from rl_training.data.fields import leaves
from rl_training.types import Batch, Field, Fields

ALIGNMENT = 64  # bytes: a cache line


class SharedMemory:
    """A file without a name, given to other processes by its descriptor (`pass_fds` of subprocess)."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = new_file() if descriptor is None else descriptor

    def resize(self, size: int) -> None:
        """The new bytes are zero. Pages that nobody writes to take no memory."""
        os.ftruncate(self.descriptor, size)

    @cached_property
    def bytes(self) -> mmap.mmap:
        """All of the memory, in the size that it has at the first use."""
        return mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)

    def close(self) -> None:
        """The memory stays where it is mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def new_file() -> int:
    """The descriptor of an empty file without a name, in memory where the system has a way."""
    if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm, which is 64 MB in many containers
        return os.memfd_create("rl_training", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def shared_bytes(fields: Fields) -> int:
    """The bytes that arrays with the shapes and dtypes of the fields take together."""
    return sum(_padded(math.prod(field.shape) * field.dtype.itemsize) for _, field in leaves(fields))


def arrays_in(memory: Any, place: int, fields: Fields) -> Batch:
    """Arrays of the fields' shapes that lie in `memory`, one after the other from byte `place` on."""

    def next_array(field: Field) -> Any:
        nonlocal place
        array = np.frombuffer(memory, field.dtype, math.prod(field.shape), place).reshape(field.shape)
        place += _padded(array.nbytes)
        return array

    arrays: Batch = tree_map(next_array, fields)
    return arrays


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
