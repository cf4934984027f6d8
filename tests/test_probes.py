"""The probe ladder: each algorithm finds the known values and actions of tiny environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import probes
from rl_training.algorithms.a2c import A2C, A2CHyperparameters
from rl_training.algorithms.ppo import PPO, PPOHyperparameters
from rl_training.models.actor_critic import ActorCritic

GAMMA = 0.9


def ppo(runner: probes.ProbeRunner, **changes: Any) -> PPO:
    sizes = {"num_steps": 16, "update_epochs": 4, "num_minibatches": 4}
    hp = PPOHyperparameters(**{**sizes, "learning_rate": 3e-3, "gamma": GAMMA, **changes})
    return PPO(ActorCritic(runner.spaces, (32,)), hp, rng=np.random.default_rng(0))


def a2c(runner: probes.ProbeRunner, **changes: Any) -> A2C:
    hp = A2CHyperparameters(**{"num_steps": 8, "learning_rate": 2e-3, "gamma": GAMMA, **changes})
    return A2C(ActorCritic(runner.spaces, (32,)), hp, rng=np.random.default_rng(0))


def learn(make: Callable[..., Any], env: Callable[[], gym.Env], **changes: Any) -> Any:
    torch.manual_seed(0)
    runner = probes.ProbeRunner([env() for _ in range(8)])
    algorithm = make(runner, **changes)
    runner.train(algorithm, updates=60 if make is ppo else 400)
    return algorithm


def values(algorithm: Any, *obs: list[float]) -> list[float]:
    return algorithm.values(torch.tensor(obs)).tolist()


def probability_of_one(algorithm: Any, obs: float) -> float:
    policy, _ = algorithm.model(torch.tensor([[obs]]))
    return policy.log_probs.exp()[0, 1].item()


both = pytest.mark.parametrize("make", [ppo, a2c])


@both
def test_the_value_of_a_constant_reward(make: Callable[..., Any]) -> None:
    assert values(learn(make, probes.ConstantReward), [0.0]) == pytest.approx([1.0], abs=0.05)


@both
def test_the_value_depends_on_what_is_seen(make: Callable[..., Any]) -> None:
    assert values(learn(make, probes.SeenReward), [-1.0], [1.0]) == pytest.approx([-1.0, 1.0], abs=0.1)


@both
def test_a_delayed_reward_is_discounted(make: Callable[..., Any]) -> None:
    assert values(learn(make, probes.DelayedReward), [0.0], [1.0]) == pytest.approx([GAMMA, 1.0], abs=0.1)


@both
def test_the_better_of_two_actions_is_found(make: Callable[..., Any]) -> None:
    algorithm = learn(make, probes.Bandit)
    assert probability_of_one(algorithm, 0.0) > 0.95


@both
def test_the_better_action_depends_on_what_is_seen(make: Callable[..., Any]) -> None:
    algorithm = learn(make, probes.SeenBandit)
    assert probability_of_one(algorithm, 1.0) > 0.95
    assert probability_of_one(algorithm, -1.0) < 0.05


@both
def test_the_best_continuous_action_is_found(make: Callable[..., Any]) -> None:
    algorithm = learn(make, probes.ContinuousBandit)
    decision = algorithm.act(np.zeros((1, 1), np.float32), None, explore=False, rng=np.random.default_rng(0))
    assert decision.action.item() == pytest.approx(0.5, abs=0.15)
    assert algorithm.model.log_std.item() < 0.0


@both
def test_a_truncated_episode_is_worth_as_much_as_an_endless_one(make: Callable[..., Any]) -> None:
    algorithm = learn(make, lambda: probes.Chain(truncates=True), vf_coef=1.0, learning_rate=1e-2, gae_lambda=0.95)
    assert values(algorithm, [1.0]) == pytest.approx([1 / (1 - GAMMA)], rel=0.02)


@both
def test_a_terminated_episode_is_worth_what_is_left_of_it(make: Callable[..., Any]) -> None:
    algorithm = learn(make, lambda: probes.Chain(truncates=False), vf_coef=1.0)
    left = [(1 - GAMMA ** (5 - t)) / (1 - GAMMA) for t in range(5)]
    assert values(algorithm, *np.eye(5).tolist()) == pytest.approx(left, rel=0.05)
