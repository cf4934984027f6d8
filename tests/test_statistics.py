"""Interquartile mean and bootstrap interval, compared with slow definitions written from the paper."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from scipy.stats import trim_mean

from rl_training.ops.statistics import bootstrap_interval, interquartile_mean, resampled_rows


def slow_iqm(scores):
    """Leave the lowest quarter and the highest quarter out, rounded down, one by one; then the mean."""
    left = list(scores)
    for _ in range(math.floor(len(scores) / 4)):
        left.remove(min(left))
        left.remove(max(left))
    return math.fsum(left) / len(left)


def slow_quantile(values, share):
    """By linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def every_resample(tasks):
    """The statistic of all resamples there are, each equally likely: the bootstrap without chance."""
    of_each_task = [list(itertools.product(scores, repeat=len(scores))) for scores in tasks]
    return [slow_iqm([score for part in parts for score in part]) for parts in itertools.product(*of_each_task)]


@pytest.mark.parametrize("count", range(1, 14))
def test_iqm_is_the_mean_of_the_middle_half(count):
    generator = random.Random(count)
    scores = [generator.gauss(0, 10) for _ in range(count)]
    assert interquartile_mean(np.array(scores)) == pytest.approx(slow_iqm(scores), abs=1e-12)
    assert interquartile_mean(np.array(scores)) == pytest.approx(trim_mean(scores, 0.25), abs=1e-12)


def test_iqm_of_a_curve_is_that_of_each_point():
    curve = np.random.default_rng(0).normal(size=(7, 9))
    np.testing.assert_allclose(interquartile_mean(curve), [slow_iqm(list(row)) for row in curve], atol=1e-12)


def test_iqm_is_not_moved_by_a_single_bad_seed():
    assert interquartile_mean(np.array([-1e9, 1.0, 2.0, 3.0, 4.0])) == 2.0


@pytest.mark.parametrize("tasks", [[[1.0, 5.0, 6.0, 8.0, 20.0]], [[0.0, 1.0, 5.0], [100.0, 130.0, 190.0]]])
def test_the_interval_is_that_of_all_resamples_within_the_tasks(tasks):
    exact = every_resample(tasks)
    scores = np.array([score for scores in tasks for score in scores])
    strata = [task for task, scores in enumerate(tasks) for _ in scores]
    low, high = bootstrap_interval(scores, strata, resamples=40_000)
    spread = max(exact) - min(exact)
    for found, share in ((low, 0.025), (high, 0.975)):
        # Few resamples are different: between the ends that a slightly different share would give.
        below, above = slow_quantile(exact, share - 0.004), slow_quantile(exact, share + 0.004)
        assert below - 1e-9 <= found <= above + 1e-9
    assert high - low < spread, "the interval leaves the rarest resamples out"


def test_a_resample_draws_within_strata_as_many_as_there_are():
    """Without strata, some resamples would have no score of the good task, and the interval would reach far down."""
    strata = ["a", "b", "a", "b", "b"]
    rows = resampled_rows(strata, 500, seed=3)
    assert rows.shape == (500, 5)
    for row in rows:
        assert sorted(strata[position] for position in row) == sorted(strata)
    assert {position for row in rows for position in row} == set(range(5))
    scores = np.array([0.0, 100.0, 1.0, 101.0])
    low, high = bootstrap_interval(scores, [0, 1, 0, 1])
    assert (low, high) == (50.0, 51.0)
    wide_low, wide_high = bootstrap_interval(scores)
    assert wide_low < 20
    assert wide_high > 80


def test_the_interval_of_a_curve_is_that_of_each_point_and_repeats():
    curve = np.random.default_rng(1).normal(size=(4, 6))
    low, high = bootstrap_interval(curve)
    for i, row in enumerate(curve):
        assert bootstrap_interval(row) == (low[i], high[i])
    assert all(low <= interquartile_mean(curve))
    assert all(interquartile_mean(curve) <= high)


def test_the_interval_has_the_confidence_it_says():
    """Of 300 samples of 12 scores, the mean of whose middle half is 0 in the long run, about 95 % hold it."""
    rng = np.random.default_rng(2)
    low, high = bootstrap_interval(rng.normal(size=(300, 12)), resamples=500)
    assert 0.86 <= np.mean((low <= 0) & (high >= 0)) <= 0.99
    narrow_low, narrow_high = bootstrap_interval(rng.normal(size=(300, 12)), resamples=500, confidence=0.5)
    assert 0.35 <= np.mean((narrow_low <= 0) & (narrow_high >= 0)) <= 0.65
