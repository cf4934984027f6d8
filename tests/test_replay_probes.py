"""The probe ladder for the algorithms that learn from a replay: known values and actions of tiny environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import probes
from build import build, make_replay
from rl_training.algorithms.dqn import DQN, DQNHyperparameters
from rl_training.algorithms.sac import SAC, SACHyperparameters

GAMMA = 0.9
NUM_ENVS = 8
DQN_HP = {
    "hidden_sizes": (32,),
    "buffer_capacity": 2000,
    "batch_size": 32,
    "learning_starts": 64,
    "learning_rate": 3e-3,
    "gamma": GAMMA,
    "epsilon": 0.3,
    "utd_ratio": 0.25,
    "train_frequency": 8,
    "target_update_interval": 80,
}


def trained(algo: str, hp: Any, env: Callable[[], gym.Env], steps: int) -> Any:
    """A learner after the shortest loop around a replay."""
    torch.manual_seed(0)
    runner = probes.ProbeRunner([env() for _ in range(NUM_ENVS)])
    learner = build(algo, runner.spaces, hp)
    replay, first = make_replay(algo, learner, runner.spaces, NUM_ENVS), np.ones(NUM_ENVS, bool)
    for _ in range(steps):
        step = runner.step(learner.actor)
        replay.add({**step, "first": first})
        first = step["terminated"] | step["truncated"]
        learner.learn(replay)
    return learner


def learn(env: Callable[[], gym.Env], *, steps: int = 200, **changes: Any) -> DQN:
    return trained("dqn", DQNHyperparameters(**{**DQN_HP, **changes}), env, steps)


@torch.no_grad()
def q_values(dqn: DQN, *obs: list[float]) -> np.ndarray:
    """[observations, actions]"""
    return dqn.model(torch.tensor(obs)).numpy()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"double": True, "dueling": True, "prioritized": True, "n_step": 3},
}
every_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def test_the_value_of_a_constant_reward() -> None:
    np.testing.assert_allclose(q_values(learn(probes.ConstantReward), [0.0]), 1.0, atol=0.02)


def test_the_value_depends_on_what_is_seen() -> None:
    q = q_values(learn(probes.SeenReward), [-1.0], [1.0])
    np.testing.assert_allclose(q, [[-1.0, -1.0], [1.0, 1.0]], atol=0.02)


@every_variant
def test_a_delayed_reward_is_discounted(changes: dict[str, Any]) -> None:
    q = q_values(learn(probes.DelayedReward, **changes), [0.0], [1.0])
    np.testing.assert_allclose(q, [[GAMMA, GAMMA], [1.0, 1.0]], atol=0.02)


def greedy(dqn: DQN, obs: float) -> int:
    return int(
        dqn.actor.act(np.array([[obs]], np.float32), None, explore=False, rng=np.random.default_rng(0)).action[0]
    )


def test_the_better_of_two_actions_is_found() -> None:
    dqn = learn(probes.Bandit)
    assert greedy(dqn, 0.0) == 1
    np.testing.assert_allclose(q_values(dqn, [0.0]), [[-1.0, 1.0]], atol=0.02)


@every_variant
def test_the_better_action_depends_on_what_is_seen(changes: dict[str, Any]) -> None:
    dqn = learn(probes.SeenBandit, **changes)
    assert [greedy(dqn, -1.0), greedy(dqn, 1.0)] == [0, 1]
    np.testing.assert_allclose(q_values(dqn, [-1.0], [1.0]), [[1.0, -1.0], [-1.0, 1.0]], atol=0.02)


@every_variant
def test_a_truncated_episode_is_worth_as_much_as_an_endless_one(changes: dict[str, Any]) -> None:
    dqn = learn(lambda: probes.Chain(truncates=True), steps=600, target_update_interval=40, **changes)
    np.testing.assert_allclose(q_values(dqn, [1.0]), 1 / (1 - GAMMA), rtol=0.02)


@every_variant
def test_a_terminated_episode_is_worth_what_is_left_of_it(changes: dict[str, Any]) -> None:
    dqn = learn(lambda: probes.Chain(truncates=False), steps=300, **changes)
    left = np.array([(1 - GAMMA ** (5 - t)) / (1 - GAMMA) for t in range(5)])
    q = q_values(dqn, *np.eye(5).tolist())
    np.testing.assert_allclose(q, np.stack([left, left], 1), rtol=0.05)


class ContinuousChain(probes.Chain):
    """The same reward for every action, of which there is a continuum."""

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


SAC_HP = {
    "hidden_sizes": (32,),
    "buffer_capacity": 2000,
    "batch_size": 32,
    "learning_starts": 64,
    "learning_rate": 3e-3,
    "gamma": GAMMA,
    "tau": 0.1,
    "utd_ratio": 0.25,
    "train_frequency": 8,
}


def learn_sac(env: Callable[[], gym.Env], *, steps: int = 250, **changes: Any) -> SAC:
    return trained("sac", SACHyperparameters(**{**SAC_HP, **changes}), env, steps)


@torch.no_grad()
def soft_q(sac: SAC, obs: list[list[float]], action: Any = None) -> np.ndarray:
    """[2 critics, observations], of an action or of what the policy would do."""
    states = torch.tensor(obs)
    greedy = sac.actor.act(states.numpy(), None, explore=False, rng=np.random.default_rng(0)).action
    actions = torch.from_numpy(greedy) if action is None else torch.full((len(states), 1), action)
    return torch.stack(list(sac.critic(states, actions))).reshape(2, len(states)).numpy()


def test_sac_finds_the_best_continuous_action() -> None:
    sac = learn_sac(probes.ContinuousBandit, target_entropy=-3.0)
    decision = sac.actor.act(np.zeros((1, 1), np.float32), None, explore=False, rng=np.random.default_rng(0))
    assert decision.action.item() == pytest.approx(0.5, abs=0.1)
    for action, reward in ((0.25, -0.0625), (0.5, 0.0), (0.75, -0.0625)):
        np.testing.assert_allclose(soft_q(sac, [[0.0]], action), reward, atol=0.1)


def test_sac_values_a_truncated_episode_like_an_endless_one() -> None:
    sac = learn_sac(lambda: ContinuousChain(truncates=True), steps=500, alpha=0.0)
    np.testing.assert_allclose(soft_q(sac, [[1.0]]), 1 / (1 - GAMMA), rtol=0.02)


def test_sac_values_what_is_left_of_a_terminated_episode() -> None:
    sac = learn_sac(lambda: ContinuousChain(truncates=False), alpha=0.0)
    left = [(1 - GAMMA ** (5 - t)) / (1 - GAMMA) for t in range(5)]
    np.testing.assert_allclose(soft_q(sac, np.eye(5).tolist()), [left, left], rtol=0.05)
