"""Memory that a learner and its actors share: weights are never seen half-written, rollouts stay until released."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import torch

import envs_for_tests  # noqa: F401  (registers the environments)
from pattern_actor import PatternActor
from rl_training import ALGORITHMS
from rl_training.data.batch import tree_map
from rl_training.data.shared_memory import SharedMemory, arrays_in, shared_bytes
from rl_training.envs.factory import spec_of
from rl_training.runtime.controls import Controls
from rl_training.runtime.process_fleet import ProcessFleet
from rl_training.runtime.rollout_worker import Order, WorkerPlan
from rl_training.types import Field, Weights

ACTORS, VERSIONS = 2, 400


def test_weights_are_never_seen_half_written_and_rollouts_stay(tiny_config: Any) -> None:
    """The learner writes versions as fast as it can, while two actors look at the ones that they were given."""
    config = tiny_config("impala", {"env_id": "RandomWalkForTests-v0"}, num_steps=2, hidden_sizes=[256, 256])
    recipe = dataclasses.replace(ALGORITHMS["impala"].recipe, actor=PatternActor)
    hp = Controls.of(config, recipe.hyperparameters).at(0)
    fleet = ProcessFleet(ACTORS)
    try:
        spec = spec_of(config.env_id)
        for index in range(ACTORS):
            fleet.start(index, WorkerPlan(index, recipe, config.tasks[0], 1, index, "cpu", spec))
        facts = answers(fleet)
        for index in range(ACTORS):
            fleet.ask(index, "attach", hp)
        fleet.allocate(answers(fleet)[0], 2 * ACTORS + 2)
        size = recipe.actor(facts[0].spaces, hp, device=torch.device("cpu")).weights().vector.size
        idle, kept, played, ordered = set(range(ACTORS)), deque[Any](), 0, {}
        for version in range(VERSIONS):
            fleet.publish(Weights(np.full(size, version, np.float32), {}, version))
            for index in idle:
                fleet.order(index, Order(hp, None, 0))
                ordered[index] = version
            idle.clear()
            fleet.wait(0.0005)
            for event in fleet.events():
                assert event.fault is None, f"{event.fault}\n{event.fault.trace}"
                assert event.rollout is not None
                idle.add(event.worker)
                arrays = fleet.part(event.rollout).arrays
                assert np.all(arrays["version"] == ordered[event.worker])
                kept.append((event.rollout, tree_map(np.copy, arrays)))
                played += 1
            while len(kept) > 2:
                rollout, copy = kept.popleft()
                arrays = fleet.part(rollout).arrays
                assert all(np.array_equal(arrays[key], copy[key]) for key in copy)
                fleet.release(rollout)
        assert played > 10
    finally:
        fleet.close()


def answers(fleet: ProcessFleet) -> list[Any]:
    """The next answer of each worker."""
    found: dict[int, Any] = {}
    while len(found) < ACTORS:
        fleet.wait(1.0)
        for event in fleet.events():
            assert event.fault is None, event.fault
            found[event.worker] = event.answer
    return [found[index] for index in range(ACTORS)]


def test_arrays_lie_one_after_the_other_and_keep_their_bytes() -> None:
    fields = {"image": Field((3, 5), np.dtype(np.uint8)), "more": {"x": Field((7,), np.dtype(np.float64))}}
    memory, size = SharedMemory(), shared_bytes(fields)
    assert size == 64 + 64
    memory.resize(3 * size)
    one, two = (arrays_in(memory.bytes, place * size, fields) for place in (0, 2))
    one["image"][:], one["more"]["x"][:] = 1, 2.0
    two["image"][:], two["more"]["x"][:] = 3, 4.0
    other = SharedMemory(memory.descriptor)  # as another process sees it
    again = arrays_in(other.bytes, 0, fields)
    assert np.all(again["image"] == 1)
    assert np.all(again["more"]["x"] == 2.0)
    memory.close()
    assert np.all(two["more"]["x"] == 4.0)  # what is mapped stays
