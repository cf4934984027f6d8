"""Work in parts covers all of it once, whatever the number of cores, and searches do not show it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rl_training.ops import search as ops
from rl_training.ops import threads
from rl_training.ops.threads import in_parts


@pytest.fixture
def cores(monkeypatch):
    def pretend(number):
        threads._threads.cache_clear()
        monkeypatch.setattr(threads, "usable_cores", lambda: number)

    yield pretend
    threads._threads.cache_clear()


@pytest.mark.parametrize(
    ("size", "least", "number", "expected"),
    [
        (10, 4, 8, [(0, 5), (5, 10)]),
        (10, 2, 3, [(0, 3), (3, 6), (6, 10)]),
        (7, 4, 8, [(0, 7)]),
        (7, 1, 1, [(0, 7)]),
        (0, 4, 2, [(0, 0)]),
    ],
)
def test_parts(cores, size, least, number, expected):
    cores(number)
    seen = []
    in_parts(lambda begin, end: seen.append((begin, end)), size, least)
    assert sorted(seen) == expected


def test_parts_run_side_by_side(cores):
    cores(2)
    both = threading.Barrier(2, timeout=30)
    in_parts(lambda begin, end: both.wait(), 2, 1)


def test_an_error_comes_up(cores):
    cores(2)

    def fails(begin, end):
        raise ValueError(f"part {begin}")

    with pytest.raises(ValueError, match="part 0"):
        in_parts(fails, 2, 1)


@pytest.mark.parametrize("rules", [ops.MUZERO, ops.EFFICIENTZERO, ops.GUMBEL])
def test_a_search_in_parts_is_the_same(cores, monkeypatch, rules):
    monkeypatch.setattr(ops, "PART", 3)
    rng, batch, actions = np.random.default_rng(0), 11, 4
    words = rng.standard_normal((21, batch, actions + 2)).astype(np.float32)
    gumbel = rng.gumbel(size=(batch, actions)).astype(np.float32)
    root = ops.Evaluation(words[0, :, :actions], words[0, :, actions], np.zeros(batch, np.float32), 0.9)
    results = []
    for number in (1, 3):
        cores(number)
        results.append(
            ops.Search(actions)(
                rules,
                lambda node, parent, edge: ops.Packed(words[node], np.full(batch, 0.9, np.float32)),
                root,
                num_simulations=20,
                gumbel=gumbel,
            )
        )
    for alone, together in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, together)
