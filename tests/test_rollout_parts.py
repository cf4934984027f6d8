"""A rollout that is joined from parts is the one of all environments together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.data.batch import rows_of, tree_map
from rl_training.data.fields import fields_of
from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import (
    JoinedRollout,
    RolloutPart,
    memory_fields,
    part_fields,
    part_of,
    read_part,
    write_part,
)
from rl_training.types import Step

STEPS, ENVS, SHARE = 5, 6, 2
SHARES = [slice(begin, begin + SHARE) for begin in range(0, ENVS, SHARE)]


def steps(seed: int) -> list[Step]:
    """Of all environments: random, with two observations, memory, and ends of both kinds."""
    rng = np.random.default_rng(seed)

    def observation() -> dict[str, Any]:
        return {"image": rng.integers(256, size=(ENVS, 2, 2), dtype=np.uint8), "x": rng.normal(size=(ENVS, 3))}

    def one() -> Step:
        return {
            "obs": observation(),
            "action": rng.integers(5, size=ENVS),
            "reward": rng.normal(size=ENVS).astype(np.float32),
            "terminated": rng.random(ENVS) < 0.2,
            "truncated": rng.random(ENVS) < 0.3,
            "memory": {"h": rng.normal(size=(ENVS, 4)).astype(np.float32)},
            "next_obs": observation(),
            "next_memory": {"h": rng.normal(size=(ENVS, 4)).astype(np.float32)},
        }

    return [one() for _ in range(STEPS)]


def filled(rollout: Rollout, given: list[Step], rows: slice) -> Rollout:
    rollout.reset()
    for step in given:
        rollout.add(rows_of(step, rows))
    assert rollout.full
    return rollout


def sent(given: list[Step], rows: slice) -> RolloutPart:
    return part_of(filled(Rollout(STEPS, SHARE, fields_of(given[0])), given, rows))


def in_shared_arrays(given: list[Step], rows: slice) -> RolloutPart:
    fields = fields_of(given[0])
    layout = part_fields(STEPS, SHARE, fields, memory_fields(given[0]["memory"]))
    target = tree_map(lambda field: np.zeros(field.shape, field.dtype), layout)
    num_ends = write_part(filled(Rollout(STEPS, SHARE, fields, target["arrays"]), given, rows), target)
    return read_part(target, num_ends)


def observed_after(rollout: Rollout) -> torch.Tensor:
    """[T, N] A number of what followed the ends, where they are."""
    return rollout.next_value(torch.zeros(STEPS, ENVS), rollout.ends()[2]["obs"]["x"][:, 1].float())


def remembered_after(rollout: Rollout) -> torch.Tensor:
    return rollout.next_value(torch.zeros(STEPS, ENVS), rollout.ends()[2]["memory"]["h"][:, 2])


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


@pytest.mark.parametrize("part", [sent, in_shared_arrays])
def test_nothing_is_in_another_place(part: Callable[[list[Step], slice], RolloutPart]) -> None:
    """Also in the second rollout of the same arrays."""
    fields = fields_of(steps(0)[0])
    joined, whole = JoinedRollout(STEPS, ENVS, fields), Rollout(STEPS, ENVS, fields)
    for seed in range(2):
        given = steps(seed)
        filled(whole, given, slice(ENVS))
        joined.join([part(given, rows) for rows in SHARES])
        assert equal(joined.arrays, whole.arrays)
        assert torch.equal(joined.start_memory["h"], whole.start_memory["h"])
        assert len(joined.ends()[0]) == len(whole.ends()[0]) > ENVS
        for values in ([leaf(rollout) for rollout in (joined, whole)] for leaf in (observed_after, remembered_after)):
            assert torch.equal(*values)
            assert values[0].count_nonzero() == len(whole.ends()[0])


@pytest.mark.parametrize("part", [sent, in_shared_arrays])
def test_parts_are_copied(part: Callable[[list[Step], slice], RolloutPart]) -> None:
    """Their memory is written again by the next rollouts of the actors."""
    given = steps(0)
    joined = JoinedRollout(STEPS, ENVS, fields_of(given[0]))
    parts = [part(given, rows) for rows in SHARES]
    joined.join(parts)
    before = [tree_map(np.copy, joined.arrays), joined.start_memory["h"].clone(), joined.ends()[2]["obs"]["x"].clone()]
    for one in parts:
        for tree in (one.arrays, one.start_memory, one.ends[2]):
            tree_map(lambda array: array.fill(0), tree)
    assert equal(joined.arrays, before[0])
    assert torch.equal(joined.start_memory["h"], before[1])
    assert torch.equal(joined.ends()[2]["obs"]["x"], before[2])
