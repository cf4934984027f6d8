"""What is captured on a GPU, replayed without one: searches and gradients from recorded operations are the plain ones.

test_graphed.py compares the same with real CUDA graphs, where there is a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import test_scalezero_update as scalezero
from naive_planning import BOARD, PLAIN, TORQUE, make
from recorded_capture import RecordedCapture
from rl_training.acting.graphed import GraphedGradient
from rl_training.acting.inference import GraphInference, TorchInference
from rl_training.acting.planning import Planner
from rl_training.algorithms.base import scalar_names
from rl_training.data.batch import tree_map
from rl_training.models.moe import MixtureOfExperts
from rl_training.models.scalezero import TaskModel
from rl_training.types import Array
from test_planner import boards
from test_planning_update import CASES, prepared

pytestmark = pytest.mark.filterwarnings("error:a gradient cannot be captured")
NODES = 4
MODELS: dict[str, Any] = {
    "muzero": lambda: make("muzero").model,
    "board": lambda: make("gumbel_muzero", BOARD, value_limit=0, reward_limit=0).model,
    "continuous": lambda: make("muzero", TORQUE).model,
    "efficientzero": lambda: make("efficientzero", lstm_horizon=2).model,
    "scalezero": lambda: TaskModel(scalezero.make().model, 0),
}


class Pair:
    """One model asked through recorded graphs and directly."""

    def __init__(self, kind: str) -> None:
        self.kind, self.model = kind, MODELS[kind]()
        self.capture = RecordedCapture()
        self.captured, self.plain = GraphInference(self.model, self.capture), TorchInference(self.model)
        self.plain.decodes = False  # a compiled loop adds up in another order
        self.rng = np.random.default_rng(0)

    def observe(self, batch: int) -> Any:
        if self.kind == "board":
            return boards(batch, seed=int(self.rng.integers(1000)))
        size = 3 if self.kind == "scalezero" else 2
        return self.rng.standard_normal((batch, size), dtype=np.float32)

    def act(self, batch: int) -> Array:
        if self.kind == "continuous":
            return self.rng.uniform(-1, 1, (batch, 2)).astype(np.float32)
        return self.rng.integers(self.model.policy_size, size=batch)

    def search(self, batch: int, nodes: int = NODES) -> None:
        """All that a search asks for, node by node, and what it leaves behind."""
        obs = self.observe(batch)
        both = self.captured, self.plain
        assert_close(*(each.initial(obs, nodes) for each in both))
        for node in range(1, nodes + 1):
            parent, action = self.rng.integers(node, size=batch), self.act(batch)
            assert_close(*(each.recurrent(node, parent, action) for each in both))
        rows = batch * (nodes + 1)
        assert_close(self.captured.states[:rows], self.plain.states[:rows])
        assert torch.equal(self.captured.roots, self.plain.roots)


def assert_close(one: Any, other: Any) -> None:
    """Products of fewer rows may be added up in another order."""
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("half", [3, 100])
@pytest.mark.parametrize("kind", MODELS)
def test_captured_steps_are_the_model_s(kind: str, half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphInference, "HALF", half)
    monkeypatch.setattr(MixtureOfExperts, "chosen_experts", MixtureOfExperts.all_experts)  # as on a GPU
    pair = Pair(kind)
    for _ in range(3):
        pair.search(7)
    parts = 2 if half == 3 else 1
    assert len(pair.captured.bounds) == parts + 1
    assert len(pair.captured.graphs) == parts
    assert len(pair.capture.made) == parts + (kind != "board")  # one more for plain observations
    assert {graph.captured.replays for graph in pair.captured.graphs.values()} == {3 * NODES}


def test_new_weights_are_in_the_graphs() -> None:
    pair = Pair("muzero")
    pair.search(5)
    captures = len(pair.capture.made)
    pair.model.load_state_dict(make("muzero", seed=9).model.state_dict())
    pair.search(5)
    with torch.no_grad():
        for parameter in pair.model.parameters():
            parameter.mul_(1.1)
    pair.search(5)
    assert len(pair.capture.made) == captures


def test_batches_of_other_sizes_have_graphs_of_their_own() -> None:
    pair = Pair("muzero")
    for batch in (4, 2, 4, 6, 2, 4):
        pair.search(batch)
    assert len(pair.captured.graphs) == len(pair.captured.first_graphs) == 3
    assert len(pair.capture.made) == 6


def test_a_longer_search_has_a_larger_arena_and_new_graphs() -> None:
    """Graphs that point into the old one would write where nobody reads."""
    pair = Pair("muzero")
    pair.search(4, nodes=2)
    (first,) = pair.captured.graphs.values()
    pair.search(3, nodes=2)
    pair.search(4, nodes=5)
    assert first not in pair.captured.graphs.values()
    assert len(pair.captured.graphs) == 2
    pair.search(4, nodes=2)
    assert len(pair.captured.graphs) == 2
    assert len(pair.captured.states) == 4 * 6  # of the longest: a shorter search uses a part of it


def test_what_was_not_used_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphInference, "MOST", 3)
    pair = Pair("muzero")
    for batch in (1, 2, 3, 1, 4):  # of 1, 2 and 3, number 2 was used first
        pair.search(batch, nodes=2)
    assert set(pair.captured.arenas) == {key[0] for key in pair.captured.graphs} == {1, 3, 4}
    assert {shape[0] for ((_, shape, _),) in pair.captured.first_graphs} == {1, 3, 4}
    for batch in (2, 1, 3):
        pair.search(batch, nodes=2)
    assert set(pair.captured.arenas) == {2, 1, 3}


def test_parts_are_asked_and_answered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One half is two nodes ahead of the other; each has its own rows."""
    monkeypatch.setattr(GraphInference, "HALF", 2)
    pair = Pair("efficientzero")
    obs, batch = pair.observe(5), 5
    for each in (pair.captured, pair.plain):
        each.initial(obs, NODES)
    parts = [slice(0, 2), slice(2, 5)]
    asked = [(np.zeros(batch, np.int64) if node == 1 else np.full(batch, node - 2), pair.act(batch)) for node in (1, 2)]
    expected = [pair.plain.recurrent(node, *asked[node - 1]).copy() for node in (1, 2)]
    answers: dict[tuple[int, int], Array] = {}
    for part, node in ((0, 1), (0, 2), (1, 1), (1, 2)):
        parent, action = asked[node - 1]
        pair.captured.ask(part, node, parent[parts[part]], action[parts[part]])
        answers[node, part] = pair.captured.answer(part).copy()
    for node in (1, 2):
        assert_close(np.concatenate([answers[node, 0], answers[node, 1]]), expected[node - 1])


@pytest.mark.parametrize("half", [4, 100])
@pytest.mark.parametrize(("algo", "spaces"), [("muzero", PLAIN), ("gumbel_muzero", BOARD), ("efficientzero", PLAIN)])
def test_a_plan_from_graphs_is_the_plain_one(
    algo: str, spaces: Any, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphInference, "HALF", half)
    learner = make(algo, spaces, **({"value_limit": 0, "reward_limit": 0} if spaces is BOARD else {}))
    planners = [Planner(learner.model, spaces, num_candidates=2) for _ in range(2)]
    for planner, inference in zip(
        planners, (GraphInference(learner.model, RecordedCapture()), TorchInference(learner.model)), strict=True
    ):
        planner.fusable, planner.inference = False, inference
    for batch in (9, 3):
        obs = boards(batch) if spaces is BOARD else np.random.default_rng(batch).normal(size=(batch, 2)).astype("f")
        fast, slow = (
            learner.actor.plan_with(
                planner, obs, learner.hp, temperature=0.0, num_simulations=8, rng=np.random.default_rng(0)
            )
            for planner in planners
        )
        np.testing.assert_array_equal(fast.visits, slow.visits)
        np.testing.assert_array_equal(fast.action, slow.action)
        np.testing.assert_allclose(fast.value, slow.value, atol=1e-5)


def graphed(learner: Any) -> RecordedCapture:
    capture = RecordedCapture()
    learner.fast_gradient = GraphedGradient(learner.gradient, learner.constants_of_gradient, capture)
    return capture


def rows_of(batch: Any, rows: Array) -> Any:
    """Some of a batch's sequences. Of next_obs it has one for each unrolled step."""
    count = len(batch["weight"])

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (count, -1))[rows].flatten(0, 1)

    return {key: tree_map(chosen, entry) for key, entry in batch.items()}


def assert_same_update(one: Any, other: Any, batch: Any) -> None:
    reports = [each.update(batch) for each in (one, other)]
    (report, error), (plain_report, plain_error) = reports
    assert report.keys() == plain_report.keys()
    assert all(torch.equal(report[name], plain_report[name]) for name in report)
    assert torch.equal(error, plain_error)
    ours, theirs = (each.optimizers["model"].parameters for each in (one, other))
    assert torch.equal(ours.gradient, theirs.gradient)
    assert torch.equal(ours.vector, theirs.vector)


@pytest.mark.parametrize("case", CASES)
def test_a_captured_gradient_is_the_gradient(case: str) -> None:
    """To the bit, with other rows each time, while the weights move."""
    (one, batch), (other, _) = (prepared(case, learning_rate=0.01) for _ in range(2))
    capture, rng = graphed(one), np.random.default_rng(0)
    for _ in range(GraphedGradient.WARM_UP + 3):
        assert_same_update(one, other, rows_of(batch, rng.permutation(24)[:12]))
    (captured,) = capture.made
    assert captured.replays == 3
    assert capture.runs == GraphedGradient.WARM_UP


def test_a_report_is_not_overwritten_by_the_next() -> None:
    learner, batch = prepared("muzero", learning_rate=0.01)
    graphed(learner)
    for _ in range(GraphedGradient.WARM_UP):
        learner.update(batch)
    report, error = learner.update(batch)
    kept = {name: value.clone() for name, value in report.items()}, error.clone()
    learner.update(rows_of(batch, np.arange(24)[::-1].copy()))
    assert all(torch.equal(report[name], kept[0][name]) for name in report)
    assert torch.equal(error, kept[1])
    assert learner.fast_gradient.graph is not None


def test_another_coefficient_or_size_is_another_capture() -> None:
    (one, batch), (other, _) = (prepared("muzero", learning_rate=0.01) for _ in range(2))
    capture = graphed(one)
    small = rows_of(batch, np.arange(8))
    changes: list[tuple[dict[str, float], Any]] = [
        ({}, batch), ({"value_coef": 3.0}, batch), ({"hidden_gradient_scale": 0.9}, batch), ({}, small)
    ]  # fmt: skip
    for captures, (change, learned_from) in enumerate(changes, 1):
        one.hp = other.hp = dataclasses.replace(one.hp, **change)
        for _ in range(GraphedGradient.WARM_UP + 2):
            assert_same_update(one, other, learned_from)
        assert len(capture.made) == captures


def test_where_numbers_keep_changing_it_goes_on_without() -> None:
    (one, batch), (other, _) = (prepared("muzero", learning_rate=0.01) for _ in range(2))
    capture = graphed(one)
    for number in range(GraphedGradient.MAX_CAPTURES + 2):
        one.hp = other.hp = dataclasses.replace(one.hp, value_coef=1 + number / 10)
        for _ in range(GraphedGradient.WARM_UP + 1):
            assert_same_update(one, other, batch)
    assert len(capture.made) == GraphedGradient.MAX_CAPTURES
    assert one.fast_gradient.graph is None


def test_what_cannot_be_captured_goes_on_without() -> None:
    (one, batch), (other, _) = (prepared("muzero", learning_rate=0.01) for _ in range(2))
    capture, plain = graphed(one), one.fast_gradient.gradient

    def reads_back(batch: Any) -> dict[str, torch.Tensor]:
        report: dict[str, torch.Tensor] = plain(batch)
        float(report["loss"])
        return report

    one.fast_gradient.gradient = reads_back
    for _ in range(GraphedGradient.WARM_UP):
        assert_same_update(one, other, batch)
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph .*_local_scalar_dense.*: it runs slower"):
        assert_same_update(one, other, batch)
    one.hp = other.hp = dataclasses.replace(one.hp, value_coef=3.0)
    for _ in range(GraphedGradient.WARM_UP + 2):  # without another warning: it is not tried again
        assert_same_update(one, other, batch)
    assert capture.made == []


def test_the_cause_is_what_failed_first() -> None:
    """An end of a capture that has failed raises an error too."""
    one, batch = prepared("muzero")
    capture = graphed(one)

    def fails(function: Any) -> None:
        try:
            function()
        finally:
            raise RuntimeError("failed due to a previous error during capture")

    def refused(batch: Any) -> dict[str, torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    capture.__class__ = type("Failing", (RecordedCapture,), {"__call__": lambda self, function: fails(function)})
    for _ in range(GraphedGradient.WARM_UP):
        one.update(batch)
    plain, one.fast_gradient.gradient = one.fast_gradient.gradient, refused
    with (
        pytest.warns(UserWarning, match=r"as a CUDA graph \(operation not permitted"),
        pytest.raises(RuntimeError, match="operation not permitted"),
    ):
        one.update(batch)  # it goes on without a capture, and is refused again
    one.fast_gradient.gradient = plain
    one.update(batch)


@pytest.mark.parametrize("case", ["muzero", "gumbel", "continuous", "efficientzero"])
def test_every_number_that_a_gradient_reads_is_a_constant_of_its_capture(case: str) -> None:
    """One that is not would stay in the graph as it was, whatever its schedule says."""
    learner, batch = prepared(case)
    before, constants = learned(learner, batch), learner.constants_of_gradient()
    usual, read = learner.hp, []
    for name in scalar_names(type(usual)):
        value = getattr(usual, name)
        other = 0.5 if value is None else value + 1 if isinstance(value, int) else value / 2 + 0.01
        learner.hp = dataclasses.replace(usual, **{name: other})
        after = learned(learner, batch)
        if any(not torch.equal(before[key], after[key]) for key in before):
            read.append(name)
            assert learner.constants_of_gradient() != constants, name
    assert {"policy_coef", "value_coef", "reward_coef", "unroll_coef", "hidden_gradient_scale"} <= set(read)


def learned(learner: Any, batch: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    report = learner.gradient(batch)
    return {**report, "gradient": learner.optimizers["model"].parameters.gradient.clone()}
