"""ScaleZero's model in numpy says what it says in torch, wherever a search may go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rl_training.acting.inference import TorchInference
from rl_training.acting.numpy_transformer import NumpyInference
from rl_training.acting.paths import make_inference
from rl_training.models.moe import Adapters
from rl_training.models.scalezero import ScaleZeroModel
from rl_training.models.world_transformer import TransformerSize
from rl_training.types import Spaces

TASKS = [Spaces(Box(-1, 1, (4,), np.float32), Discrete(2)), Spaces(Box(-1, 1, (3,), np.float32), Discrete(5))]


def make(*, width=12, experts=3, **options):
    torch.manual_seed(0)
    model = ScaleZeroModel(TASKS, TransformerSize(width, 2, 3, experts, 7), Adapters(2, 3, 2.0), **options).eval()
    stir(model)
    return model


@torch.no_grad()
def stir(model):
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))


def walk(inference, task, batch, nodes, seed, steps=0):
    """What is said of roots, after histories of up to so many steps, and of random nodes below them
    [nodes + 1, B, A + 2]."""
    rng = np.random.default_rng(seed)
    shape = TASKS[task].observation.shape
    obs = rng.standard_normal((batch, *shape)).astype(np.float32)
    history = None
    if steps:
        history = {
            "obs": rng.standard_normal((batch, steps, *shape)).astype(np.float32),
            "action": rng.integers(TASKS[task].action.n, size=(batch, steps)),
            "length": np.arange(batch) % (steps + 1),
        }
    words = [inference.initial(obs, nodes, history).copy()]
    for node in range(1, nodes + 1):
        parent, action = rng.integers(node, size=batch), rng.integers(TASKS[task].action.n, size=batch)
        words.append(inference.recurrent(node, parent, action).copy())
    return np.stack(words)


def assert_agree(model, task=1, batch=4, nodes=14, seed=0, inference=None, steps=0):
    view = model.for_task(task)
    actual = walk(inference or NumpyInference(view), task, batch, nodes, seed, steps)
    expected = walk(TorchInference(view), task, batch, nodes, seed, steps)
    assert np.ptp(expected, 0).min() > 1e-4  # nodes differ
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 6])
def test_nodes_of_any_depth(task, context, batch):
    assert_agree(make(context=context), task, batch)


@pytest.mark.parametrize(
    "options",
    [
        {"routing": "one"},
        {"task_embedding": False},
        {"value_limit": 5, "reward_limit": 9},
        {"value_limit": 0, "reward_limit": 7},
        {"value_limit": 0, "reward_limit": 0},
        {"experts": 1},
        {"train_context": 4},
    ],
)
def test_every_option(options):
    assert_agree(make(**options))


@pytest.mark.parametrize("context", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 6])
def test_nodes_below_roots_that_remember(context, batch):
    model = make(context=context)
    assert_agree(model, batch=batch, steps=context - 1)
    inference = NumpyInference(model.for_task(1))
    for steps in (context - 1, 0, context - 1):  # nothing is left of an earlier search
        assert_agree(model, batch=batch, steps=steps, inference=inference)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("fixed", [False, True])
def test_later_stages(stage, fixed):
    model = make()
    model.set_stage(stage)
    if not fixed:
        assert_agree(model)
        return
    with model.fixed_weights():
        assert_agree(model)


def test_one_search_after_the_other_of_any_size():
    model = make()
    inference = NumpyInference(model.for_task(1))
    for seed, (batch, nodes) in enumerate([(3, 5), (3, 2), (3, 9), (5, 9), (2, 9), (3, 20)]):
        assert_agree(model, 1, batch, nodes, seed, inference)


def test_new_weights_take_effect_with_a_refresh():
    model = make()
    inference = NumpyInference(model.for_task(1))
    assert_agree(model, inference=inference)
    stir(model)
    inference.refresh()
    assert_agree(model, inference=inference)


def test_numpy_is_for_small_models_on_the_cpu():
    assert type(make_inference(make().for_task(0))) is NumpyInference
    assert type(make_inference(make(width=768, experts=64).for_task(0))) is TorchInference
