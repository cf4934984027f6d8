"""Every fast path gives what the plain path gives, on the same weights and inputs."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import TINY
from rl_training.acting import paths
from rl_training.acting.forward import NumpyForward, TorchForward
from rl_training.acting.graphed import GraphedGradient
from rl_training.acting.inference import TorchInference
from rl_training.acting.numpy_transformer import NumpyInference
from rl_training.acting.paths import plain_paths
from rl_training.acting.q_gradient import QGradient
from rl_training.acting.recurrent_forward import TorchRecurrentForward
from rl_training.runtime.controls import Controls
from rl_training.runtime.registry import ALGORITHMS
from rl_training.types import Spaces

DISCRETE = Spaces(gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(3))
CONTINUOUS = Spaces(gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32))
OBS = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
CASES: dict[str, tuple[str, Spaces, dict[str, Any]]] = {
    "ppo": ("ppo", DISCRETE, {}),
    "ppo, continuous": ("ppo", CONTINUOUS, {}),
    "a2c, relu": ("a2c", DISCRETE, {"activation": "relu"}),
    "ppg, detach": ("ppg", CONTINUOUS, {"architecture": "detach"}),
    "dqn": ("dqn", DISCRETE, {"epsilon": 0.3}),
    "recurrent_ppo": ("recurrent_ppo", DISCRETE, {}),
    "recurrent_ppo, continuous": ("recurrent_ppo", CONTINUOUS, {"critic_memory": "shared"}),
    "recurrent_ppo, gru": ("recurrent_ppo", DISCRETE, {"cell": "gru", "critic_memory": "none"}),
    "sac": ("sac", CONTINUOUS, {}),
    "muzero": ("muzero", DISCRETE, {"num_simulations": 12}),
    "muzero, decoded": ("muzero", DISCRETE, {"num_simulations": 12, "activation": "silu"}),
    "gumbel_muzero": ("gumbel_muzero", DISCRETE, {"num_simulations": 12}),
    "efficientzero": ("efficientzero", DISCRETE, {"num_simulations": 12}),
    "scalezero": ("scalezero", DISCRETE, {"num_simulations": 12}),
}


def build(algo: str, spaces: Spaces, changes: dict[str, Any]) -> tuple[Any, Any]:
    """(learner, actor), with weights that are not zero anywhere."""
    recipe = ALGORITHMS[algo].recipe
    hp = Controls(recipe.hyperparameters, {**TINY[algo], **changes}, 100).at(0)
    torch.manual_seed(0)
    actor = recipe.actor([spaces] if recipe.multi_task else spaces, hp, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return recipe.learner(actor, hp, rng=np.random.default_rng(0)), recipe.actor_of(actor, 0)


def way(learner: Any, actor: Any) -> tuple[Any, ...]:
    """The kinds of the paths that were chosen."""
    planner = getattr(actor, "planner", None)
    chosen = (type(actor.forward),) if planner is None else (type(planner.inference), planner.inference.decodes)
    return (*chosen, getattr(planner, "fusable", None), type(getattr(learner, "numpy_gradient", None)))


@pytest.mark.parametrize("case", CASES)
def test_acting_on_the_fast_path_is_acting_on_the_plain_one(case):
    fast = build(*CASES[case])
    with plain_paths():
        plain = build(*CASES[case])
    assert way(*fast) != way(*plain)
    assert way(*plain)[0] in (TorchForward, TorchInference, TorchRecurrentForward)
    assert NumpyForward not in way(*plain)
    assert NumpyInference not in way(*plain)
    memory: list[Any] = [{}, {}]
    for step in range(3):
        for explore in (False, True):
            rngs = [np.random.default_rng(step) for _ in range(2)]
            both = [
                actor.act(OBS + step, remembered, explore=explore, rng=rng)
                for (_, actor), remembered, rng in zip((fast, plain), memory, rngs, strict=True)
            ]
            np.testing.assert_allclose(both[0].action, both[1].action, atol=1e-4)
            assert both[0].extras.keys() == both[1].extras.keys()
            for name, value in both[0].extras.items():
                np.testing.assert_allclose(value, both[1].extras[name], atol=2e-4, err_msg=name)
            assert rngs[0].random() == rngs[1].random()
        memory = [decision.memory for decision in both]


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_dqns_gradient_in_numpy_is_autograds(double, weighted):
    rng = np.random.default_rng(3)
    batch = {
        "obs": torch.from_numpy(OBS),
        "next_obs": torch.from_numpy(OBS[::-1].copy()),
        "action": torch.from_numpy(rng.integers(0, 3, 6)),
        "reward": torch.from_numpy(rng.standard_normal(6).astype(np.float32)),
        "discount": torch.tensor([0.9, 0.0, 0.9, 0.81, 0.9, 0.9]),
    } | ({"weight": torch.linspace(0.2, 1.0, 6)} if weighted else {})
    case = ("dqn", DISCRETE, {"double": double})
    (fast, _), plain = build(*case), None
    with plain_paths():
        plain, _ = build(*case)
    assert isinstance(fast.numpy_gradient, QGradient)
    assert plain.numpy_gradient is None
    for learner in (fast, plain):
        torch.manual_seed(4)
        with torch.no_grad():  # the target network prefers other actions
            for parameter in learner.target_model.parameters():
                parameter.add_(torch.randn_like(parameter))
    reports, errors = zip(*(learner.update(batch) for learner in (fast, plain)), strict=True)
    torch.testing.assert_close(errors[0], errors[1])
    for name, value in reports[0].items():
        torch.testing.assert_close(value, reports[1][name], check_dtype=False)
    torch.testing.assert_close(*(learner.actor.parameters.gradient for learner in (fast, plain)))


def test_large_networks_and_images_take_the_plain_path():
    assert build("dqn", DISCRETE, {"hidden_sizes": [512], "batch_size": 64})[0].numpy_gradient is None
    pixels = Spaces(gym.spaces.Box(0, 255, (36, 36), np.uint8), gym.spaces.Discrete(3))
    learner, actor = build("dqn", pixels, {})
    assert learner.numpy_gradient is None
    assert isinstance(actor.forward, TorchForward)
    assert isinstance(build("ppo", DISCRETE, {"activation": "silu"})[1].forward, TorchForward)
    wide = {"width": 256, "heads": 4, "num_experts": 8, "expert_size": 512}
    assert type(build("scalezero", DISCRETE, wide)[1].planner.inference) is TorchInference


def test_a_gradient_is_captured_on_a_gpu_alone():
    def gradient(batch):
        return batch

    assert paths.make_gradient(gradient, torch.device("cpu")) is gradient
    graphed = paths.make_gradient(gradient, torch.device("cuda"))
    assert isinstance(graphed, GraphedGradient)
    assert (graphed.gradient, graphed.constants) == (gradient, tuple)
