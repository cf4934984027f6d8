"""Rows of a ring that must not change for a while, because a checkpoint reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from rl_training.types import Array


class Holds:
    """Ranges of rows, one range of each environment for each checkpoint that is being written.

    Whoever writes to the ring calls `wait` first. The thread that reads the rows releases them.
    """

    def __init__(self, length: int) -> None:
        """length: rows in the ring of one environment."""
        self.length = length
        self._ranges: list[tuple[Array, Array]] = []  # (first row [N], number of rows [N])
        self._released = threading.Condition()

    def hold(self, first: Array, count: Array) -> Callable[[], None]:
        """Hold `count` [N] rows from row `first` [N] on. The function returned releases them, from any thread."""
        held = (first, count)
        with self._released:
            self._ranges = [*self._ranges, held]

        def release() -> None:
            with self._released:
                self._ranges = [other for other in self._ranges if other is not held]
                self._released.notify_all()

        return release

    def wait(self, place: Array) -> None:
        """Return as soon as none of the places [...] is held."""
        if not self._ranges:
            return
        env, row = np.divmod(place, self.length)

        def free() -> bool:
            return not any(((row - first[env]) % self.length < count[env]).any() for first, count in self._ranges)

        with self._released:
            self._released.wait_for(free)
