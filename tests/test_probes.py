"""The probe ladder: each algorithm finds the known values and actions of tiny environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import probes
from build import build
from rl_training.algorithms.a2c import A2C, A2CHyperparameters
from rl_training.algorithms.ppo import PPO, PPOHyperparameters
from rl_training.algorithms.trpo import TRPO, TRPOHyperparameters

GAMMA = 0.9


def ppo(runner: probes.ProbeRunner, **changes: Any) -> PPO:
    sizes = {"num_steps": 16, "update_epochs": 4, "num_minibatches": 4}
    hp = PPOHyperparameters(hidden_sizes=(32,), **{**sizes, "learning_rate": 3e-3, "gamma": GAMMA, **changes})
    learner: PPO = build("ppo", runner.spaces, hp)
    return learner


def a2c(runner: probes.ProbeRunner, **changes: Any) -> A2C:
    hp = A2CHyperparameters(hidden_sizes=(32,), **{"num_steps": 8, "learning_rate": 2e-3, "gamma": GAMMA, **changes})
    learner: A2C = build("a2c", runner.spaces, hp)
    return learner


def trpo(runner: probes.ProbeRunner, **changes: Any) -> TRPO:
    changes.pop("vf_coef", None)  # the critic has a loss of its own
    sizes = {"num_steps": 16, "max_kl": 0.03, "critic_epochs": 4, "critic_minibatches": 4}
    hp = TRPOHyperparameters(hidden_sizes=(32,), **{**sizes, "learning_rate": 3e-3, "gamma": GAMMA, **changes})
    learner: TRPO = build("trpo", runner.spaces, hp)
    return learner


def learn(make: Callable[..., Any], env: Callable[[], gym.Env], **changes: Any) -> Any:
    torch.manual_seed(0)
    runner = probes.ProbeRunner([env() for _ in range(8)])
    learner = make(runner, **changes)
    runner.train(learner, updates=400 if make is a2c else 60)
    return learner


def values(learner: Any, *obs: list[float]) -> list[float]:
    return learner.end_values({"obs": torch.tensor(obs)}).tolist()


def probability_of_one(learner: Any, obs: float) -> float:
    policy, _ = learner.model(torch.tensor([[obs]]))
    return policy.log_probs.exp()[0, 1].item()


each = pytest.mark.parametrize("make", [ppo, a2c, trpo])


@each
def test_the_value_of_a_constant_reward(make: Callable[..., Any]) -> None:
    assert values(learn(make, probes.ConstantReward), [0.0]) == pytest.approx([1.0], abs=0.05)


@each
def test_the_value_depends_on_what_is_seen(make: Callable[..., Any]) -> None:
    assert values(learn(make, probes.SeenReward), [-1.0], [1.0]) == pytest.approx([-1.0, 1.0], abs=0.1)


@each
def test_a_delayed_reward_is_discounted(make: Callable[..., Any]) -> None:
    assert values(learn(make, probes.DelayedReward), [0.0], [1.0]) == pytest.approx([GAMMA, 1.0], abs=0.1)


@each
def test_the_better_of_two_actions_is_found(make: Callable[..., Any]) -> None:
    learner = learn(make, probes.Bandit)
    assert probability_of_one(learner, 0.0) > 0.95


@each
def test_the_better_action_depends_on_what_is_seen(make: Callable[..., Any]) -> None:
    learner = learn(make, probes.SeenBandit)
    assert probability_of_one(learner, 1.0) > 0.95
    assert probability_of_one(learner, -1.0) < 0.05


@each
def test_the_best_continuous_action_is_found(make: Callable[..., Any]) -> None:
    learner = learn(make, probes.ContinuousBandit)
    decision = learner.actor.act(np.zeros((1, 1), np.float32), None, explore=False, rng=np.random.default_rng(0))
    assert decision.action.item() == pytest.approx(0.5, abs=0.15)
    assert learner.model.log_std.item() < 0.0


@each
def test_a_truncated_episode_is_worth_as_much_as_an_endless_one(make: Callable[..., Any]) -> None:
    learner = learn(make, lambda: probes.Chain(truncates=True), vf_coef=1.0, learning_rate=1e-2, gae_lambda=0.95)
    assert values(learner, [1.0]) == pytest.approx([1 / (1 - GAMMA)], rel=0.02)


@each
def test_a_terminated_episode_is_worth_what_is_left_of_it(make: Callable[..., Any]) -> None:
    learner = learn(make, lambda: probes.Chain(truncates=False), vf_coef=1.0)
    left = [(1 - GAMMA ** (5 - t)) / (1 - GAMMA) for t in range(5)]
    assert values(learner, *np.eye(5).tolist()) == pytest.approx(left, rel=0.05)
