"""The sum tree against cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.data.priorities import find, set_leaves
from rl_training.types import Array


def make_tree(weight: Array) -> Array:
    """With room for more leaves than there are weights, unless their number is a power of two."""
    tree = np.zeros(2 << (len(weight) - 1).bit_length(), np.float64)
    set_leaves(tree, np.arange(len(weight)), weight.astype(np.float64))
    return tree


def by_cumulative_sum(weight: Array, mass: Array) -> Array:
    return np.searchsorted(np.cumsum(weight), mass, side="right")


def assert_sums(tree: Array) -> None:
    half = len(tree) // 2
    parents = np.arange(1, half)
    np.testing.assert_allclose(tree[parents], tree[2 * parents] + tree[2 * parents + 1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 100, 1000])
def test_whole_weights_are_found_exactly(count: int) -> None:
    rng = np.random.default_rng(count)
    weight = rng.integers(0, 4, count).astype(np.float64)
    weight[rng.integers(count)] += 1
    tree = make_tree(weight)
    assert tree[1] == weight.sum()
    assert_sums(tree)
    mass = np.arange(0, weight.sum(), 0.25)  # includes every boundary
    found = find(tree, mass)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, by_cumulative_sum(weight, mass))
    assert (weight[found] > 0).all()


@pytest.mark.parametrize("weight", [[0, 0, 3, 0, 0], [0, 1], [1, 0], [0, 0.1, 0, 0.2, 0, 0.7, 0, 0], [5]], ids=str)
def test_edges_never_lead_to_a_leaf_without_weight(weight: list[float]) -> None:
    array = np.array(weight)
    tree, total = make_tree(array), float(array.sum())
    full = np.flatnonzero(array)
    assert find(tree, np.zeros(1))[0] == full[0]
    ends = np.array([np.nextafter(tree[1], 0), tree[1], np.nextafter(tree[1], np.inf), total * (1 + 1e-12)])
    assert (find(tree, ends) == full[-1]).all()


def test_leaves_are_replaced() -> None:
    rng = np.random.default_rng(0)
    weight = rng.random(300)
    tree = make_tree(weight)
    for _ in range(200):
        index = rng.choice(300, 17, replace=False)
        value = rng.random(17) * (rng.random(17) < 0.7) * 10.0 ** rng.integers(-6, 6)
        weight[index] = value
        set_leaves(tree, index, value)
    np.testing.assert_array_equal(tree[512:812], weight)
    np.testing.assert_array_equal(tree[812:], 0)
    assert_sums(tree)
    mass = rng.random(20_000) * tree[1]
    found, edges = find(tree, mass), np.concatenate([[0], np.cumsum(weight)])
    slack = 1e-9 * tree[1]
    assert (weight[found] > 0).all()
    assert ((edges[found] <= mass + slack) & (mass < edges[found + 1] + slack)).all()


def test_an_index_may_come_twice_in_a_batch() -> None:
    tree = make_tree(np.ones(6))
    set_leaves(tree, np.array([3, 3, 5, 3]), np.array([2.0, 2.0, 0.0, 2.0]))
    assert tree[1] == 6
    assert_sums(tree)


@given(
    weight=st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=40).filter(any),
    fraction=st.lists(st.floats(0, 1), min_size=1, max_size=30),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_weights(weight: list[float], fraction: list[float]) -> None:
    array = np.array(weight)
    tree = make_tree(array)
    assert_sums(tree)
    mass = np.array(fraction) * tree[1]
    found, edges = find(tree, mass), np.concatenate([[0], np.cumsum(array)])
    slack = 1e-9 * tree[1]
    assert (array[found] > 0).all()
    assert ((edges[found] <= mass + slack) & (mass < edges[found + 1] + slack)).all()
