"""Running mean and variance of a stream of batches (Chan, Golub & LeVeque, 1979)."""

from __future__ import annotations

import math

import numpy as np

from rl_training.data.state_check import compare_state
from rl_training.types import Array, State


class RunningMeanStd:
    """Mean and variance of all rows seen so far, in float64; nothing is assumed before the first row."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean = np.zeros(shape, np.float64)
        self.count = 0.0
        self._squares = np.zeros(shape, np.float64)  # sum of squared deviations from the mean

    @property
    def var(self) -> Array:
        """The population variance; one before anything was seen."""
        return self._squares / self.count if self.count else np.ones_like(self.mean)

    def update(self, batch: Array) -> None:
        """Merge the rows of batch [B, *shape] into the statistics."""
        size = len(batch)
        if not size:
            return
        batch_mean = np.add.reduce(batch, 0, np.float64) / size
        deviation = batch - batch_mean
        deviation *= deviation
        self._merge(batch_mean, np.add.reduce(deviation, 0), size)

    def _merge(self, mean: Array, squares: Array, count: float) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self._squares = self._squares + squares + delta * delta * (self.count * count / total)
        self.count = total

    def state_dict(self) -> State:
        return {"mean": self.mean.copy(), "squares": self._squares.copy(), "count": float(self.count)}

    def load_state_dict(self, state: State) -> None:
        compare_state(self.state_dict(), state, "statistics")
        mean, squares, count = state["mean"], state["squares"], float(state["count"])
        if not (np.isfinite(mean).all() and np.isfinite(squares).all() and squares.min(initial=0.0) >= 0):
            raise ValueError(
                "statistics: the mean and the sum of squares should be finite, and the latter not negative"
            )
        if not 0 <= count < math.inf:
            raise ValueError(f"statistics: the count should be a number of rows, got {count}")
        self.mean, self._squares, self.count = np.array(mean), np.array(squares), count
