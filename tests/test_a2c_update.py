"""A2C's update against Stable-Baselines3: the parameters and the optimizer's state after steps on the same data."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

from build import build
from probes import copy_training, random_rollout
from rl_training.algorithms.a2c import A2C, A2CHyperparameters
from rl_training.types import Spaces
from test_ppo_update import CONTINUOUS, DISCRETE, Nowhere, copy_weights, fill_their_buffer, their_parameters, vector

LR, EPS = 0.01, 0.05  # large, so that where epsilon stands shows


def make_a2c(spaces: Spaces = DISCRETE, *, seed: int = 0, **changes: Any) -> A2C:
    torch.manual_seed(seed)
    learner: A2C = build("a2c", spaces, A2CHyperparameters(**changes), rng=np.random.default_rng(seed))
    return learner


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("optimizer", ["rmsprop", "rmsprop_tf", "adam"])
def test_steps_are_those_of_stable_baselines3(
    spaces: Spaces, optimizer: Literal["rmsprop", "rmsprop_tf", "adam"]
) -> None:
    from stable_baselines3 import A2C as TheirA2C
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
    from stable_baselines3.common.vec_env import DummyVecEnv

    num_envs = 4
    ours = make_a2c(spaces, optimizer=optimizer, ent_coef=0.01, gae_lambda=1.0, learning_rate=LR, rmsprop_eps=EPS)
    policy_kwargs: dict[str, Any] = {}
    if optimizer == "rmsprop_tf":
        policy_kwargs = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": EPS, "alpha": 0.99}}
    if optimizer == "adam":
        policy_kwargs = {"optimizer_class": torch.optim.Adam, "optimizer_kwargs": {"eps": 1e-5}}
    theirs = TheirA2C(
        "MlpPolicy",
        DummyVecEnv([lambda: Nowhere(spaces)] * num_envs),
        ent_coef=0.01,
        learning_rate=LR,
        rms_prop_eps=EPS,
        use_rms_prop=optimizer == "rmsprop",
        policy_kwargs=policy_kwargs,
        device="cpu",
    )
    theirs.set_logger(Logger(None, []))
    copy_weights(ours.model, theirs.policy)
    for i in range(3):
        rollout = random_rollout(ours, spaces, num_steps=5, num_envs=num_envs, seed=i)
        fill_their_buffer(theirs.rollout_buffer, rollout, ours.end_values(rollout.ends()[2]).numpy())
        ours.update(rollout)
        theirs.train()

    key, state = ("exp_avg_sq" if optimizer == "adam" else "square_avg"), theirs.policy.optimizer.state
    mine = ours.optimizers["model"]
    squares = mine.parameters.views(mine.square)
    for parameter, expected, square in zip(
        ours.model.parameters(), their_parameters(theirs.policy), squares, strict=True
    ):
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(square, state[expected][key], atol=1e-6, rtol=1e-5)


def test_the_three_optimizers_differ() -> None:
    rollout = random_rollout(make_a2c(), DISCRETE, num_steps=5, num_envs=4)
    after = []
    for optimizer in ("rmsprop", "rmsprop_tf", "adam"):
        learner = make_a2c(optimizer=optimizer)
        metrics = learner.update(rollout)
        assert set(metrics) == {"policy_loss", "value_loss", "entropy", "explained_variance", "grad_norm"}
        assert learner.gradient_steps == 1
        after.append(vector(learner))
    assert not torch.allclose(after[0], after[1])
    assert not torch.allclose(after[0], after[2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 1e-3),
        ("gamma", 0.5),
        ("gae_lambda", 0.5),
        ("ent_coef", 0.1),
        ("vf_coef", 0.1),
        ("max_grad_norm", 0.01),
    ],
)
def test_every_scalar_has_an_attribute_and_an_effect(name: str, value: float) -> None:
    as_usual, changed = make_a2c(optimizer="rmsprop_tf"), make_a2c(optimizer="rmsprop_tf")
    rollout = random_rollout(as_usual, DISCRETE, num_steps=5, num_envs=4)
    setattr(changed, name, value)
    assert getattr(changed.hp, name) == value
    for learner in (as_usual, changed):
        learner.update(rollout)
    assert not torch.equal(vector(as_usual), vector(changed))


@pytest.mark.parametrize("optimizer", ["rmsprop", "rmsprop_tf", "adam"])
def test_the_state_is_complete(optimizer: str) -> None:
    learner, copy = (make_a2c(seed=seed, optimizer=optimizer) for seed in range(2))
    first, second = (random_rollout(learner, DISCRETE, num_steps=5, num_envs=4, seed=i) for i in range(2))
    learner.update(first)
    copy_training(learner, copy)
    learner.update(second)
    copy.update(second)
    assert torch.equal(vector(learner), vector(copy))
