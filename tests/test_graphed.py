"""A gradient from a captured graph is that of the same function run kernel by kernel; on a GPU only."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from build import build
from naive_planning import restore
from rl_training import ALGORITHMS
from rl_training.acting.graphed import GraphedGradient
from rl_training.acting.inference import GraphInference, TorchInference
from rl_training.acting.planning import Planner
from rl_training.types import Spaces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPACES = Spaces(gym.spaces.Box(0, 255, (4, 48, 48), np.uint8), gym.spaces.Discrete(3), frame_stack=4)
KINDS = ("muzero", "efficientzero")
B, K = 8, 5


def make(kind: str, **numbers: Any) -> Any:
    torch.manual_seed(0)
    hp = ALGORITHMS[kind].recipe.hyperparameters(channels=8, batch_size=B, unroll_steps=K, **numbers)
    return build(kind, SPACES, hp, device="cuda")


def batch(number: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (B * (K + 1), 4, 48, 48), dtype=torch.uint8, generator=g)
    ones = torch.ones(B, K + 1)
    made = {
        "obs": images[:B], "next_obs": images[B:], "action": torch.randint(0, 3, (B, K), generator=g),
        "reward": torch.randn(B, K, generator=g), "value": torch.randn(B, K + 1, generator=g),
        "policy": torch.softmax(torch.randn(B, K + 1, 3, generator=g), -1), "weight": torch.rand(B, generator=g),
        "policy_mask": ones, "value_mask": ones, "reward_mask": ones[:, 1:],
    }  # fmt: skip
    return {key: value.cuda() for key, value in made.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_gradient_is_the_gradient(kind: str) -> None:
    options = {"augment": False} if kind == "efficientzero" else {}
    graphed, plain = make(kind, **options), make(kind, **options)
    plain.fast_gradient = plain.gradient
    for number in range(3 * GraphedGradient.WARM_UP):
        reports = []
        for each in (graphed, plain):
            report, error = each.update(batch(number))
            reports.append(report | {"error": error})
        for name, value in reports[1].items():
            torch.testing.assert_close(reports[0][name], value, rtol=2e-3, atol=2e-3, msg=f"{name} at {number}")
        # One step of Adam moves a weight by the learning rate, whatever the gradient's size: compare where it is large.
        ours, theirs = (each.optimizers["model"].parameters.gradient for each in (graphed, plain))
        assert torch.nn.functional.cosine_similarity(ours, theirs, 0) > 0.999
        restore(graphed, plain)
    assert graphed.fast_gradient.graph is not None


def test_another_coefficient_is_another_capture() -> None:
    learner = make("muzero")
    for number in range(GraphedGradient.WARM_UP + 1):
        learner.update(batch(number))
    first = learner.fast_gradient.graph
    assert first is not None
    other = make("muzero", value_coef=3.0)
    other.fast_gradient = other.gradient
    learner.hp = other.hp
    for number in range(GraphedGradient.WARM_UP + 2):
        restore(other, learner)
        ours, theirs = learner.update(batch(number))[0], other.update(batch(number))[0]
        torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=2e-3, atol=2e-3)
    assert learner.fast_gradient.graph not in (first, None)


def test_what_a_search_captured_stays_its_own() -> None:
    """A graph writes to the memory it captured: nobody else may be given that."""
    learner, rng = make("efficientzero"), np.random.default_rng(0)
    numbers: dict[str, Any] = {"temperature": 0.0, "num_simulations": 4, "root_exploration_fraction": 0.0, "rng": rng}
    learner.actor.plan(batch(0)["obs"], **numbers)
    others = [torch.full((size,), 7, dtype=torch.int64, device="cuda") for size in (1, B, 2 * B, 64) for _ in range(20)]
    learner.actor.plan(batch(1)["obs"], **numbers)
    assert all((x == 7).all() for x in others)


def test_a_captured_first_word_is_the_model_s() -> None:
    learner = make("efficientzero")
    plain = TorchInference(learner.model)
    for number in range(3):
        obs = batch(number)["obs"]
        np.testing.assert_allclose(learner.actor.planner.inference.initial(obs, 4), plain.initial(obs, 4), atol=1e-3)
        torch.testing.assert_close(learner.actor.planner.inference.roots, plain.roots, atol=1e-3, rtol=1e-3)


def test_images_are_seen_in_half_precision_where_nothing_is_learned_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, obs = make("efficientzero").model, batch(0)["obs"]
    learned_from = model.represent(obs)
    with torch.no_grad():
        seen = model.represent(obs)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        exact = model.represent(obs)
    assert seen.dtype == torch.float32
    assert learned_from.requires_grad
    assert 0 < (seen - exact).abs().max() < 0.02  # of [0, 1]
    assert (learned_from - exact).abs().max() < 0.02


@pytest.mark.parametrize("half", [3, 100])
def test_captured_steps_of_two_halves_are_the_model_s(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphInference, "HALF", half)
    learner, rng = make("efficientzero"), np.random.default_rng(0)
    captured, plain = learner.actor.planner.inference, TorchInference(learner.model)
    for number in range(2):
        for inference in (captured, plain):
            inference.initial(batch(number)["obs"], 4)
        assert len(captured.bounds) == (3 if half == 3 else 2)
        for node in range(1, 5):
            parent, action = rng.integers(node, size=B), rng.integers(3, size=B)
            words = [inference.recurrent(node, parent, action) for inference in (captured, plain)]
            np.testing.assert_allclose(*words, atol=2e-3)
        rows = 5 * B
        torch.testing.assert_close(captured.states[:rows], plain.states[:rows], atol=2e-3, rtol=2e-3)
    numbers: dict[str, Any] = {"temperature": 0.0, "num_simulations": 8, "root_exploration_fraction": 0.0, "rng": rng}
    slow = Planner(learner.model, SPACES, num_candidates=2)
    slow.inference = plain
    planners = (learner.actor.planner, slow)
    plans = [learner.actor.plan_with(planner, batch(2)["obs"], learner.hp, **numbers) for planner in planners]
    np.testing.assert_allclose(plans[0].value, plans[1].value, atol=5e-3)
    assert (plans[0].visits.sum(1) == 8).all()
