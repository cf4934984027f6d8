"""A rollout holds what was added, knows what its steps led to, and skips rows that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_training.data.batch import flatten, minibatches
from rl_training.data.fields import fields_of
from rl_training.data.rollout import Rollout
from rl_training.types import Array, Step

STARTED, LED_TO = 0.0, 0.5  # the observation at which step k started is k, the one it led to k + 0.5


def make_step(k: int, num_envs: int, terminated: Any = (), truncated: Any = (), **more: Any) -> Step:
    """Step k: everything in it is k (+ 100 for each environment's index)."""
    number = k + 100 * np.arange(num_envs, dtype=np.float32)

    def flags(rows: Any) -> Array:
        return np.isin(np.arange(num_envs), rows)

    return {
        "obs": np.repeat(number[:, None] + STARTED, 2, 1),
        "action": number.astype(np.int64),
        "reward": number,
        "value": number,
        "next_obs": np.repeat(number[:, None] + LED_TO, 2, 1),
        "terminated": flags(terminated),
        "truncated": flags(truncated),
        **more,
    }


def make_rollout(num_steps: int, num_envs: int) -> Rollout:
    return Rollout(num_steps, num_envs, fields_of(make_step(0, num_envs)))


def next_values(rollout: Rollout) -> Array:
    """The value of an observation is its first number, so what a step led to can be read off."""
    _, _, after = rollout.ends()
    value = rollout.batch["obs"][..., 0]
    return rollout.next_value(value, after["obs"][:, 0] if after else torch.empty(0)).numpy()


def test_rows_are_where_and_what_they_were() -> None:
    rollout = make_rollout(3, 2)
    for k in range(3):
        assert not rollout.full
        rollout.add(make_step(k, 2))
    assert rollout.full
    expected = np.arange(3)[:, None] + 100 * np.arange(2)
    for key in ("action", "reward", "value"):
        np.testing.assert_array_equal(rollout.arrays[key], expected)
    np.testing.assert_array_equal(rollout.arrays["obs"][..., 1], expected)
    assert rollout.batch["action"].dtype == torch.int64
    assert rollout.batch["obs"].data_ptr() == rollout.arrays["obs"].ctypes.data
    assert set(rollout.batch) == {"obs", "action", "reward", "value", "terminated", "truncated"}


def test_the_arrays_of_a_step_may_be_reused() -> None:
    rollout, step = make_rollout(2, 1), make_step(0, 1, truncated=[0])
    rollout.add(step)
    for x in step.values():
        x[:] = 0
    assert rollout.arrays["obs"][0].tolist() == [[0.0, 0.0]]
    assert rollout.ends()[2]["obs"].tolist() == [[LED_TO, LED_TO]]


def test_next_values_come_from_the_next_row_or_from_the_ends() -> None:
    rollout = make_rollout(4, 3)
    rollout.add(make_step(0, 3))
    rollout.add(make_step(1, 3, terminated=[0], truncated=[1]))
    rollout.add(make_step(2, 3, terminated=[2], truncated=[2]))
    rollout.add(make_step(3, 3, terminated=[1]))
    expected = np.array([[1, 101, 201], [np.nan, 101.5, 202], [3, 103, np.nan], [3.5, np.nan, 203.5]])
    there = ~np.isnan(expected)  # elsewhere the episode terminated and the value is multiplied by zero
    np.testing.assert_array_equal(next_values(rollout)[there], expected[there])
    assert np.isfinite(next_values(rollout)).all()
    assert len(rollout.ends()[0]) == 3


def test_dead_rows_are_skipped_and_surplus_rows_dropped() -> None:
    rollout = make_rollout(3, 2)
    rollout.add(make_step(0, 2, truncated=[1]))
    rollout.add(make_step(1, 2, live=np.array([True, False])))
    rollout.add(make_step(2, 2, truncated=[0]))
    assert not rollout.full
    rollout.add(make_step(3, 2, live=np.array([False, True])))
    assert rollout.full
    assert rollout.arrays["obs"][..., 0].tolist() == [[0, 100], [1, 102], [2, 103]]
    assert next_values(rollout).tolist() == [[1, 100.5], [2, 103], [2.5, 103.5]]
    rollout.add(make_step(4, 2))
    assert rollout.arrays["obs"][..., 0].tolist() == [[0, 100], [1, 102], [2, 103]]


def test_a_rollout_without_dead_rows_is_the_same_on_both_paths() -> None:
    fast, slow = make_rollout(5, 3), make_rollout(5, 3)
    for k in range(7):
        flags = {"terminated": [k % 3], "truncated": [(k + 1) % 3]}
        fast.add(make_step(k, 3, **flags))
        slow.add(make_step(k, 3, **flags, live=np.ones(3, bool)))
    assert fast.full
    assert slow.full
    for key, x in fast.arrays.items():
        np.testing.assert_array_equal(x, slow.arrays[key])
    np.testing.assert_array_equal(next_values(fast), next_values(slow))


def test_reset_forgets_all() -> None:
    rollout = make_rollout(2, 2)
    rollout.add(make_step(0, 2, live=np.array([True, False])))
    rollout.add(make_step(1, 2, truncated=[0, 1]))
    memory = rollout.arrays["obs"]
    rollout.reset()
    assert not rollout.full
    rollout.add(make_step(5, 2))
    rollout.add(make_step(6, 2))
    assert rollout.arrays["obs"] is memory
    assert rollout.arrays["obs"][..., 0].tolist() == [[5, 105], [6, 106]]
    assert next_values(rollout).tolist() == [[6, 106], [6.5, 106.5]]


def test_all_terminated_at_the_end_needs_no_bootstrap() -> None:
    rollout = make_rollout(1, 2)
    rollout.add(make_step(0, 2, terminated=[0, 1]))
    assert rollout.ends()[2] == {}
    assert np.isfinite(next_values(rollout)).all()


@pytest.mark.parametrize("live", [{}, {"live": np.ones(2, bool)}])
def test_observations_may_be_dicts(live: dict[str, Array]) -> None:
    steps = [make_step(k, 2, truncated=[0], **live) for k in range(2)]
    for step in steps:
        for key in ("obs", "next_obs"):
            step[key] = {"x": step[key], "y": step[key].astype(np.uint8)[:, 0]}
    rollout = Rollout(2, 2, fields_of(steps[0]))
    for step in steps:
        rollout.add(step)
    assert rollout.batch["obs"]["x"].shape == (2, 2, 2)
    assert rollout.batch["obs"]["y"].dtype == torch.uint8
    time, env, after = rollout.ends()
    assert list(zip(time.tolist(), env.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1)]
    assert after["obs"]["x"][:, 0].tolist() == [0.5, 1.5, 101.5]
    flat = flatten(rollout.batch)
    assert flat["obs"]["x"][:, 0].tolist() == [0, 100, 1, 101]


@pytest.mark.parametrize(("size", "count", "sizes"), [(12, 4, {3}), (10, 4, {2, 3}), (3, 8, {1}), (5, 1, {5})])
def test_minibatches_are_a_partition_of_nearly_equal_parts(size: int, count: int, sizes: set[int]) -> None:
    number = torch.arange(size).reshape(-1, 2 if size % 2 == 0 else 1)  # [T, N]
    batch = {"action": number, "obs": {"x": number * 2}}
    parts = list(minibatches(batch, count, np.random.default_rng(0)))
    assert len(parts) == min(count, size)
    assert {len(part["action"]) for part in parts} == sizes
    order = torch.cat([part["action"] for part in parts])
    assert sorted(order.tolist()) == list(range(size))
    assert torch.equal(torch.cat([part["obs"]["x"] for part in parts]), order * 2)


def test_minibatches_are_shuffled_by_the_generator_given() -> None:
    batch = {"action": torch.arange(100).reshape(25, 4)}

    def order(seed: int) -> list[int]:
        return torch.cat([p["action"] for p in minibatches(batch, 4, np.random.default_rng(seed))]).tolist()

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != sorted(order(0))
