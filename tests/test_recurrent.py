"""Recurrent memory: zero where episodes begin, recorded with every step, kept at the start and the ends of a rollout.

The policy here remembers how many steps it has taken in its episode, so its memory before step k of an episode is k.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs_for_tests import CounterEnv
from rl_training.data.batch import tree_map
from rl_training.data.fields import check_entries, fields_of, step_fields
from rl_training.data.recurrent import check_memory, on_cpu, reset_rows, select_rows
from rl_training.data.replay import Replay
from rl_training.data.rollout import Rollout
from rl_training.envs.backends import VectorEnvs
from rl_training.envs.episodes import Envs, Episodes, SyncEnvs
from rl_training.envs.factory import make_envs
from rl_training.envs.runner import EnvRunner
from rl_training.envs.runner_state import RunnerState
from rl_training.errors import InputError
from rl_training.runtime.checkpoints import load_checkpoint, save_checkpoint
from rl_training.runtime.restoring import restore_part
from rl_training.types import Decision, Memory, Observation

KINDS = ["numpy", "torch"]
LENGTHS = (3, 2)  # of the episodes of the two environments


class StepCounter:
    """The memory is {"count": [N], "hidden": [N, 2]}, all of which grows by one with every step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.given: list[Memory] = []

    def __call__(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        self.given.append(memory)
        memory = memory or make_memory(self.kind, *[0] * len(obs))
        return Decision(np.zeros(len(obs), np.int64), {key: value + 1 for key, value in memory.items()}, {})


def make_memory(kind: str, *counts: int) -> Memory:
    count = np.array(counts, np.int64)
    memory = {"count": count, "hidden": np.repeat(count[:, None], 2, 1).astype(np.float32)}
    return memory if kind == "numpy" else tree_map(torch.from_numpy, memory)


def counts(memory: Memory) -> list[int]:
    """The number in each row, which is the same in all of its entries."""
    assert memory["hidden"].shape == (len(memory["count"]), 2)
    assert memory["hidden"].tolist() == [[count, count] for count in memory["count"].tolist()]
    return memory["count"].tolist()


def kind_of(memory: Memory) -> set[type]:
    return {type(value) for value in memory.values()}


def sync_envs(ends: str) -> Envs:
    make = [partial(CounterEnv, length, ends) for length in LENGTHS]
    return SyncEnvs([lambda i=i, one=one: Episodes(one(), seed=0, index=i) for i, one in enumerate(make)])


def vector_envs(mode: AutoresetMode, ends: str) -> Envs:
    return VectorEnvs(SyncVectorEnv([partial(CounterEnv, length, ends) for length in LENGTHS], autoreset_mode=mode))


BACKENDS = {
    "sync": sync_envs,
    "same_step": partial(vector_envs, AutoresetMode.SAME_STEP),
    "disabled": partial(vector_envs, AutoresetMode.DISABLED),
    "next_step": partial(vector_envs, AutoresetMode.NEXT_STEP),
}


def make_rollout(runner: EnvRunner, num_steps: int) -> Rollout:
    return Rollout(num_steps, runner.num_envs, step_fields(runner.spaces, {}))


def filled(runner: EnvRunner, act: StepCounter, num_steps: int) -> Rollout:
    rollout = make_rollout(runner, num_steps)
    while not rollout.full:
        rollout.add(runner.step(act))
    return rollout


def after_ends(rollout: Rollout) -> dict[tuple[int, int], tuple[int, int]]:
    """(time, environment) of each end: (step of its episode that was observed after it, count remembered after it)."""
    time, env, after = rollout.ends()
    observed = after["obs"][:, 1].int().tolist()
    places = zip(time.tolist(), env.tolist(), strict=True)
    return dict(zip(places, zip(observed, counts(after["memory"]), strict=True), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_holds_the_memory_before_and_after_it(backend: str, kind: str) -> None:
    runner, act = EnvRunner(BACKENDS[backend]("truncated"), seed=0), StepCounter(kind)
    for number in range(12):
        step = runner.step(act)
        before, after = counts(step["memory"]), counts(step["next_memory"])
        live = step.get("live", np.ones(2, bool))
        assert [b for b, row in zip(before, live, strict=True) if row] == step["obs"][live, 1].tolist()
        assert after == [b + 1 for b in before], "also where the episode ended"
        assert counts(runner.memory) == np.where(runner.first, 0, after).tolist()
        if number:
            assert counts(act.given[-1]) == before
    assert act.given[0] == {}
    assert kind_of(runner.memory) == {np.ndarray if kind == "numpy" else torch.Tensor}


def test_a_memoryless_policy_leaves_no_trace() -> None:
    runner = EnvRunner(BACKENDS["next_step"]("truncated"), seed=0)

    def act(obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision:
        assert memory == {}
        return Decision(np.zeros(2, np.int64), memory, {})

    rollout = make_rollout(runner, 5)
    while not rollout.full:
        step = runner.step(act)
        assert not {"memory", "next_memory"} & step.keys()
        rollout.add(step)
    assert rollout.start_memory == {}
    assert rollout.ends()[2].keys() == {"obs"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rollout_starts_with_the_memory_of_its_first_rows(backend: str, kind: str) -> None:
    """Rows that are not live are no first rows: the episode after the reset begins there."""
    runner, act = EnvRunner(BACKENDS[backend]("truncated"), seed=0), StepCounter(kind)
    seen = set()
    for number in range(8):
        rollout = filled(runner, act, 4)
        start = counts(rollout.start_memory)
        assert start == rollout.arrays["obs"][0, :, 1].tolist()
        assert kind_of(rollout.start_memory) == {torch.Tensor}
        assert rollout.start_memory["count"].dtype == torch.int64
        if number == 0:
            assert start == [0, 0], "the first `act` got no memory at all"
        seen.add(tuple(start))
    assert len(seen) > 1, "rollouts begin in the middle of episodes too"


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_waits_for_its_reset_starts_with_its_next_row(kind: str) -> None:
    runner, act = EnvRunner(BACKENDS["next_step"]("truncated"), seed=0), StepCounter(kind)
    for _ in range(2):
        runner.step(act)
    rollout = make_rollout(runner, 2)
    step = runner.step(act)
    assert step["live"].tolist() == [True, False]
    assert counts(step["memory"]) == [2, 2], "the second environment's is that of the episode which has ended"
    rollout.add(step)
    while not rollout.full:
        rollout.add(runner.step(act))
    assert counts(rollout.start_memory) == [2, 0]
    assert after_ends(rollout) == {(0, 0): (3, 3), (1, 0): (1, 1), (1, 1): (2, 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ends_have_the_memory_after_their_steps(backend: str, kind: str) -> None:
    runner = EnvRunner(BACKENDS[backend]("truncated"), seed=0)
    rollout = filled(runner, StepCounter(kind), 4)
    expected = {(2, 0): (3, 3), (3, 0): (1, 1), (1, 1): (2, 2), (3, 1): (2, 2)}
    assert after_ends(rollout) == expected
    assert kind_of(rollout.ends()[2]["memory"]) == {torch.Tensor}


@pytest.mark.parametrize("backend", ["sync", "next_step"])
def test_terminated_episodes_are_no_ends(backend: str) -> None:
    runner = EnvRunner(BACKENDS[backend]("terminated"), seed=0)
    assert after_ends(filled(runner, StepCounter("numpy"), 4)) == {(3, 0): (1, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_keeps_copies(kind: str) -> None:
    runner, act = EnvRunner(BACKENDS["sync"]("truncated"), seed=0), StepCounter(kind)
    rollout = make_rollout(runner, 1)
    runner.step(act)
    step = runner.step(act)
    rollout.add(step)
    for memory in (step["memory"], step["next_memory"]):
        for value in memory.values():
            value[:] = 77
    assert counts(rollout.start_memory) == [1, 1]
    assert after_ends(rollout) == {(0, 0): (2, 2), (0, 1): (2, 2)}
    start = rollout.start_memory
    rollout.reset()
    assert rollout.start_memory == {}
    assert counts(start) == [1, 1], "who has read it may keep it"


def test_a_replay_ignores_memory() -> None:
    runner, act = EnvRunner(BACKENDS["next_step"]("truncated"), seed=0), StepCounter("torch")
    replay = Replay(20, 2, step_fields(runner.spaces, {}))
    for _ in range(8):
        replay.add(runner.step(act))
    assert not [name for name in replay.columns if "memory" in name]
    step = runner.step(act)
    assert not {"memory", "next_memory"} & fields_of(step).keys()
    check_entries(step, step_fields(runner.spaces, {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[1], np.array([1]), np.array([False, True, False])], ids=["list", "indices", "mask"])
def test_one_row_can_be_reset_or_selected(rows: Any, kind: str) -> None:
    memory = make_memory(kind, 5, 6, 7)
    reset, selected = reset_rows(memory, rows), select_rows(memory, rows)
    assert counts(reset) == [5, 0, 7]
    assert counts(selected) == [6]
    for value in selected.values():
        value[:] = 9
    assert counts(memory) == [5, 6, 7], "both are copies"
    assert counts(reset_rows(memory, [])) == [5, 6, 7]
    assert counts(reset_rows(memory, slice(None))) == [0, 0, 0]
    assert kind_of(reset) == kind_of(selected) == kind_of(memory)
    assert {key: value.dtype for key, value in reset.items()} == {key: value.dtype for key, value in memory.items()}


def cartpole(backend: str, seed: int) -> EnvRunner:
    kwargs = {"backend": backend, "wrappers": {"time_limit": 4}}
    return EnvRunner(make_envs("CartPole-v1", num_envs=2, seed=seed, env_kwargs=kwargs, training=True), seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["sync", "vector"])
def test_memory_survives_a_checkpoint(backend: str, kind: str, tmp_path: Path) -> None:
    """In the middle of episodes, and on a vector environment in the middle of a delayed reset."""

    act = StepCounter(kind)

    def played(runner: EnvRunner) -> list[Any]:
        return [tree_map(lambda x: torch.as_tensor(x).clone().numpy(), runner.step(act)) for _ in range(9)]

    runner = cartpole(backend, 3)
    for _ in range(4 if backend == "vector" else 2):
        runner.step(act)
    state = {"runner": RunnerState(runner).state_dict()}
    path = save_checkpoint(tmp_path / "checkpoint", state=state, config={}, info={"global_step": 0})
    restored = cartpole(backend, 99)
    restore_part(load_checkpoint(path), "runner", RunnerState(restored))
    assert counts(restored.memory) == counts(runner.memory) == [4 if backend == "vector" else 2] * 2
    assert kind_of(restored.memory) == {np.ndarray if kind == "numpy" else torch.Tensor}
    np.testing.assert_equal(played(restored), played(runner))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_a_copy_on_the_cpu(kind: str) -> None:
    memory = make_memory(kind, 1, 2)
    if kind == "torch":
        memory = {key: value.double().requires_grad_() for key, value in memory.items()}
    copy = on_cpu(memory)
    for value in copy.values():
        value[:] = 0
        if kind == "torch":
            assert not value.requires_grad
    assert counts({key: value.detach() if kind == "torch" else value for key, value in memory.items()}) == [1, 2]


def test_an_environment_that_cannot_be_restored_begins_without_memory() -> None:
    """Only its own row is reset."""
    runner, other = cartpole("sync", 3), cartpole("sync", 99)
    runner.step(StepCounter("torch"))
    state = RunnerState(runner).state_dict()
    state["envs"]["episodes"][1]["actions"] = None  # too long to be replayed
    RunnerState(other).load_state_dict(state)
    assert other.not_restored == [1]
    assert counts(other.memory) == [1, 0]
    assert counts(runner.memory) == counts(state["memory"]) == [1, 1]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (None, "a memory of type NoneType: it should be a dict of arrays"),
        ({"h": torch.zeros(3, 2)}, r"memory 'h' should be an array with 2 rows.*shape \(3, 2\)"),
        ({"h": torch.zeros(())}, r"memory 'h' should be an array with 2 rows.*shape \(\)"),
        ({"h": None}, "memory 'h' should be an array with 2 rows.*NoneType"),
    ],
    ids=["none", "rows", "scalar", "entry"],
)
def test_what_is_no_memory_is_an_error(memory: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_memory(memory, 2)
