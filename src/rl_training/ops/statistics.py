"""Scores of several runs as one number with an interval: interquartile mean and stratified bootstrap (Agarwal et al.,
2021, "Deep reinforcement learning at the edge of the statistical precipice")."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2_000


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half over the last axis: [..., R] -> [...].

    floor(R / 4) scores are left out on either side, so that with fewer than four it is the mean of all.
    """
    ordered = np.sort(scores, axis=-1)
    count = ordered.shape[-1]
    cut = count // 4
    middle: np.ndarray = ordered[..., cut : count - cut].mean(axis=-1)
    return middle


def bootstrap_interval(
    scores: np.ndarray,
    strata: Sequence[Hashable] | None = None,
    *,
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end of the percentile interval of a statistic over the last axis: [..., R] -> two of [...].

    strata [R]: the task of each score. A resample draws as many scores of a task as it has, with replacement.
    All rows of `scores` share the resamples, so that the interval of a curve is smooth.
    """
    drawn = resampled_rows(strata if strata is not None else [0] * scores.shape[-1], resamples, seed)
    tail = (1.0 - confidence) / 2.0
    rows = scores.reshape(-1, scores.shape[-1])
    ends = np.empty((2, len(rows)))
    for i, row in enumerate(rows):  # one after the other: all resamples of a long curve would fill the memory
        ends[:, i] = np.quantile(statistic(row[drawn]), (tail, 1.0 - tail))
    low, high = ends.reshape(2, *scores.shape[:-1])
    return low, high


def resampled_rows(strata: Sequence[Hashable], resamples: int, seed: int) -> np.ndarray:
    """[resamples, R] the positions of the scores that each resample draws, by stratum."""
    rng = np.random.default_rng(seed)
    parts = []
    for stratum in dict.fromkeys(strata):
        members = np.array([position for position, other in enumerate(strata) if other == stratum])
        parts.append(members[rng.integers(len(members), size=(resamples, len(members)))])
    return np.concatenate(parts, axis=1)
