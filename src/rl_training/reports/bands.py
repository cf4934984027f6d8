"""The curve of a group: the interquartile mean over its runs, with its bootstrap interval, on a common axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_training.ops.statistics import bootstrap_interval, interquartile_mean

POINTS = 100
RESAMPLES = 1_000


class Band(NamedTuple):
    """All [P]. Where fewer than all runs have come so far, `runs` is smaller, and the band is theirs."""

    x: np.ndarray
    iqm: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: np.ndarray


def band_of(curves: Sequence[tuple[np.ndarray, np.ndarray]], strata: Sequence[str]) -> Band | None:
    """From (x, values) of each run, x increasing; None where no two runs overlap."""
    known = [(x, values, task) for (x, values), task in zip(curves, strata, strict=True) if len(x)]
    if len(known) < 2:
        return None
    grid = common_axis([x for x, _, _ in known])
    on_grid = np.stack([on_axis(grid, x, values) for x, values, _ in known], axis=1)  # [P, R]
    present = np.isfinite(on_grid)
    result = np.full((3, len(grid)), np.nan)
    for members in np.unique(present, axis=0):
        rows = (present == members).all(axis=1)
        if members.sum() < 2:
            continue
        scores = on_grid[rows][:, members]
        tasks = [task for (_, _, task), member in zip(known, members, strict=True) if member]
        low, high = bootstrap_interval(scores, tasks, resamples=RESAMPLES)
        result[:, rows] = interquartile_mean(scores), low, high
    found = np.isfinite(result[0])
    if not found.any():
        return None
    iqm, low, high = result[:, found]
    return Band(grid[found], iqm, low, high, present[found].sum(axis=1))


def common_axis(axes: Sequence[np.ndarray]) -> np.ndarray:
    """At most POINTS places, of those where the runs have values."""
    return thinned(np.unique(np.concatenate(axes)), POINTS)


def on_axis(grid: np.ndarray, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values between those of a run by straight lines; NaN before its first and after its last."""
    between: np.ndarray = np.interp(grid, x, values, left=np.nan, right=np.nan)
    return between


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Evenly chosen entries, the first and the last among them."""
    chosen: np.ndarray = values[places(len(values), most)]
    return chosen


def places(count: int, most: int) -> np.ndarray:
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))
