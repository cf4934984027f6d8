"""Actors that plan, alone: with the weights that a learner sends they play as its own, on every path."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import test_scalezero_update as scalezero
from build import make_replay
from naive_planning import BOARD, PLAIN, SMALL, TORQUE, make
from probes import random_observation
from recorded_capture import RecordedCapture
from rl_training import ALGORITHMS
from rl_training.acting import planning as planner_module
from rl_training.acting.inference import GraphInference, TorchInference
from rl_training.acting.numpy_transformer import NumpyInference
from rl_training.acting.planning import Plan, Planner, search_arguments
from rl_training.data.recurrent import reset_rows
from rl_training.models.moe import MixtureOfExperts
from rl_training.models.scalezero import ScaleZeroModel
from rl_training.types import Array, Spaces
from test_planner import boards

IMAGES = Spaces(Box(0, 255, (3, 36, 36), np.uint8), Discrete(3))
TERNARY = {"value_limit": 0, "reward_limit": 0}
CASES: dict[str, tuple[str, Spaces, dict[str, Any]]] = {
    "muzero": ("muzero", PLAIN, {}),
    "gumbel_muzero": ("gumbel_muzero", PLAIN, {}),
    "efficientzero": ("efficientzero", PLAIN, {"lstm_horizon": 2}),
    "board": ("muzero", BOARD, TERNARY),
    "board of gumbel": ("gumbel_muzero", BOARD, TERNARY),
    "board of efficientzero": ("efficientzero", BOARD, TERNARY),
    "continuous": ("muzero", TORQUE, {}),
    "continuous gumbel": ("gumbel_muzero", TORQUE, {}),
    "continuous efficientzero": ("efficientzero", TORQUE, {}),
    "images": ("muzero", IMAGES, {"channels": 4}),
    "images of efficientzero": ("efficientzero", IMAGES, {"channels": 4}),
}
NUM_ENVS, STEPS, NUM_SIMULATIONS = 4, 12, 10


def observe(spaces: Spaces, count: int, rng: np.random.Generator) -> Any:
    if spaces is BOARD:
        return boards(count, seed=int(rng.integers(1000)))
    return random_observation(spaces.observation, count, rng)


class School:
    """A learner that learns from what its own actor plays, of whatever is seen and earned at random."""

    def __init__(self, algo: str, learner: Any, spaces: list[Spaces]) -> None:
        self.algo, self.learner, self.spaces, self.rng = algo, learner, spaces, np.random.default_rng(0)
        self.replays = [make_replay(algo, learner, each, NUM_ENVS) for each in spaces]
        self.several = ALGORITHMS[algo].recipe.multi_task

    def players(self, actor: Any) -> list[Any]:
        """Of each task."""
        recipe = ALGORITHMS[self.algo].recipe
        return [recipe.actor_of(actor, task) for task in range(len(self.spaces))]

    def actor(self) -> Any:
        """Another one, with weights that it was made with."""
        torch.manual_seed(9)
        spaces: Any = self.spaces if self.several else self.spaces[0]
        return ALGORITHMS[self.algo].recipe.actor(spaces, self.learner.hp, device=torch.device("cpu"))

    def learn(self) -> None:
        """Some steps of play in each task, and the gradient steps that these are worth."""
        for player, spaces, replay in zip(self.players(self.learner.actor), self.spaces, self.replays, strict=True):
            obs, memory, first = observe(spaces, NUM_ENVS, self.rng), {}, np.ones(NUM_ENVS, bool)
            for _ in range(STEPS):
                decision = player.act(obs, memory, explore=True, rng=self.rng)
                following, over = observe(spaces, NUM_ENVS, self.rng), self.rng.random(NUM_ENVS) < 0.2
                replay.add(
                    {
                        "obs": obs, "action": decision.action, "next_obs": following, "first": first,
                        "reward": self.rng.normal(size=NUM_ENVS).astype(np.float32), "terminated": over,
                        "truncated": np.zeros(NUM_ENVS, bool), **decision.extras,
                    }
                )  # fmt: skip
                memory = reset_rows(decision.memory, over) if decision.memory else {}
                obs, first = following, over
        assert self.learner.learn(self.replays if self.several else self.replays[0])

    def plans(self, actor: Any, planner: Any = None, *, explore: bool = True) -> list[Plan]:
        """Of each task from the same observations with the same noise; planner(player): what searches in its place."""
        plans = []
        for player, spaces in zip(self.players(actor), self.spaces, strict=True):
            obs, rng, own = observe(spaces, 6, np.random.default_rng(5)), np.random.default_rng(3), player.planner
            numbers = {**search_arguments(player.hp, explore=explore), "num_simulations": NUM_SIMULATIONS}
            player.planner = own if planner is None else planner(player)
            plans.append(player.plan(obs, rng=rng, **numbers))
            player.planner = own
        return plans


def school(case: str) -> School:
    algo, spaces, changes = CASES[case]
    numbers = {"learning_rate": 0.02, "utd_ratio": 0.1, "learning_starts": 0, "target_update_interval": 20}
    return School(algo, make(algo, spaces, **{**numbers, **changes}), [spaces])


def school_of_tasks(**changes: Any) -> School:
    numbers = {"learning_rate": 0.02, "utd_ratio": 0.03, "learning_starts": 0, "batch_size": 8}
    return School("scalezero", scalezero.make(**{**numbers, **changes}), scalezero.TASKS)


EVERY: dict[str, Any] = {
    **{case: lambda case=case: school(case) for case in CASES},
    "scalezero": school_of_tasks,
    "scalezero without memory": lambda: school_of_tasks(context=1),
    "scalezero in stages": lambda: school_of_tasks(base_stage_steps=0, stage_steps=3),
}


def assert_equal(one: list[Plan], other: list[Plan]) -> None:
    """To the bit."""
    for ours, theirs in zip(one, other, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def assert_close(one: list[Plan], other: list[Plan]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours.visits, theirs.visits)
        np.testing.assert_allclose(ours.action, theirs.action, atol=1e-4)
        np.testing.assert_allclose(ours.policy, theirs.policy, atol=1e-4)
        np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-4, atol=1e-4)


def assert_told_apart(one: list[Plan], other: list[Plan]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert np.abs(ours.value - theirs.value).max() > 1e-3


@pytest.mark.parametrize("case", EVERY)
def test_an_actor_alone_plans_as_that_of_the_learner(case: str) -> None:
    """Whenever it has loaded; in between it plays with what it has, whatever is learned meanwhile."""
    lessons = EVERY[case]()
    learner, alone = lessons.learner, lessons.actor()
    assert_told_apart(lessons.plans(alone), lessons.plans(learner.actor))
    for version in range(4):
        weights = learner.weights()
        sent = weights.vector.copy()
        assert weights.version == learner.actor.version == version
        alone.load(pickle.loads(pickle.dumps(weights)))
        assert alone.version == version
        for explore in (True, False):
            plans = lessons.plans(alone, explore=explore)
            assert_equal(plans, lessons.plans(learner.actor, explore=explore))
        plans = lessons.plans(alone)
        taken = learner.gradient_steps
        lessons.learn()
        assert learner.gradient_steps > taken
        assert_told_apart(lessons.plans(learner.actor), plans)
        assert_equal(lessons.plans(alone), plans)
        np.testing.assert_array_equal(weights.vector, sent)
    assert all(parameter.grad is None for parameter in alone.model.parameters())


@pytest.mark.parametrize("case", EVERY)
def test_it_acts_as_that_of_the_learner(case: str) -> None:
    """Step by step, with the memory that it keeps itself."""
    lessons = EVERY[case]()
    lessons.learn()
    alone = lessons.actor()
    alone.load(lessons.learner.weights())
    pairs = zip(lessons.players(alone), lessons.players(lessons.learner.actor), lessons.spaces, strict=True)
    for *both, spaces in pairs:
        assert {player.version for player in both} == {1}
        taken: list[list[Array]] = [[], []]
        for player, kept in zip(both, taken, strict=True):
            rng, memory = np.random.default_rng(1), {}
            for _ in range(5):
                obs = observe(spaces, NUM_ENVS, rng)
                action, memory, extras = player.act(obs, memory, explore=True, rng=rng)
                kept += [action, *extras.values(), *memory.values()]
        for ours, theirs in zip(*taken, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_every_path_searches_with_what_was_loaded(case: str) -> None:
    """Compiled, in graphs that were captured before, and in plain torch."""
    lessons = school(case)
    alone = lessons.actor()
    assert alone.planner.fusable == (lessons.spaces[0] in (PLAIN, BOARD))
    capture = RecordedCapture()
    graphs, plain = (
        planner_with(alone, inference)
        for inference in (GraphInference(alone.model, capture), TorchInference(alone.model))
    )
    plain.inference.decodes = False
    captures = 0
    for _ in range(3):
        alone.load(lessons.learner.weights())
        found = lessons.plans(alone)
        assert_equal(found, lessons.plans(lessons.learner.actor))
        for planner in (plain, graphs):
            assert_close(lessons.plans(alone, lambda player, planner=planner: planner), found)
        captures = captures or len(capture.made)
        assert len(capture.made) == captures  # weights are written in place: graphs stay as they are
        lessons.learn()


def planner_with(actor: Any, inference: TorchInference) -> Planner:
    planner = Planner(actor.model, actor.spaces, num_candidates=actor.hp.num_sampled_actions)
    planner.inference, planner.fusable = inference, False
    return planner


INFERENCE = {
    "numpy": NumpyInference,
    "torch": TorchInference,
    "graphs": lambda model: GraphInference(model, RecordedCapture()),
}


@contextlib.contextmanager
def only(path: str) -> Iterator[None]:
    """Within, planners of tasks are made for this path; as on a GPU where it is that of graphs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planner_module, "make_inference", INFERENCE[path])
        if path == "graphs":
            patched.setattr(MixtureOfExperts, "chosen_experts", MixtureOfExperts.all_experts)
            patched.setattr(ScaleZeroModel, "fixed_weights", lambda self: contextlib.nullcontext())
        yield


@pytest.mark.parametrize("by", ["weights", "checkpoint"])
@pytest.mark.parametrize("path", INFERENCE)
def test_a_stage_that_was_loaded_is_played_on_every_path(path: str, by: str) -> None:
    """The adapters of a stage are other operations: what was captured in the stage before knows nothing of them."""
    lessons = school_of_tasks(base_stage_steps=0, stage_steps=3)
    learner, stages = lessons.learner, []
    with only(path):
        alone = lessons.actor()
    kind = {"numpy": NumpyInference, "torch": TorchInference, "graphs": GraphInference}[path]
    for version in range(4):
        with only(path):
            if by == "weights":
                alone.load(learner.weights())
            else:
                alone.load_state_dict(learner.actor.state_dict())
            found = lessons.plans(alone)
        assert {type(actor.planner.inference) for actor in alone.actors} == {kind}
        assert_close(found, lessons.plans(learner.actor))
        assert alone.version == version
        stages.append(int(alone.model.stage))
        lessons.learn()
    assert stages == sorted(stages)
    assert set(stages) == {0, 1, 2}


def test_weights_of_another_network_are_refused() -> None:
    lessons = school("muzero")
    other = make("muzero", latent_size=SMALL["latent_size"] + 1)
    with pytest.raises(ValueError, match="do not fit a network of"):
        lessons.actor().load(other.weights())
