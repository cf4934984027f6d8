"""The probe ladder for planning: rewards, values and actions of tiny environments, as the model learns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import probes
from naive_planning import ALGORITHMS
from rl_training.types import Array
from test_replay_probes import GAMMA, trained

HP: dict[str, Any] = {
    "hidden_sizes": (32,),
    "latent_size": 8,
    "value_limit": 5,
    "reward_limit": 3,
    "num_simulations": 8,
    "unroll_steps": 2,
    "n_step": 5,
    "batch_size": 32,
    "buffer_capacity": 2000,
    "learning_starts": 64,
    "learning_rate": 3e-3,
    "weight_decay": 1e-4,
    "value_coef": 0.25,
    "gamma": GAMMA,
    "utd_ratio": 0.25,
    "target_update_interval": 80,
    "temperature": 1.0,
}
every_algorithm = pytest.mark.parametrize("algo", ALGORITHMS)


def learn(algo: str, env: Callable[[], gym.Env], *, steps: int = 200, **changes: Any) -> Any:
    cls = ALGORITHMS[algo]
    return trained(cls, cls.Hyperparameters(**{**HP, **changes}), env, steps)


def play(algorithm: Any, *obs: list[float]) -> tuple[Array, Array]:
    """(actions, root values) of a search without noise."""
    seen = np.array(obs, np.float32)
    decision = algorithm.act(seen, None, explore=False, rng=np.random.default_rng(0))
    return decision.action, decision.extras["root_value"]


@torch.no_grad()
def imagine(algorithm: Any, obs: list[float], *actions: int) -> tuple[list[float], list[float]]:
    """(values, rewards) along actions from an observation, without looking at another one."""
    said = algorithm.model.initial(torch.tensor([obs]))
    values, rewards = [said.value.item()], []
    for action in actions:
        said = algorithm.model.recurrent(said.state, torch.tensor([action]))
        values.append(said.value.item())
        rewards.append(said.reward.item())
    return values, rewards


@every_algorithm
def test_a_bandit_of_one_step(algo: str) -> None:
    algorithm = learn(algo, probes.Bandit)
    action, value = play(algorithm, [0.0])
    assert action.tolist() == [1]
    assert value == pytest.approx([1.0], abs=0.15)
    for arm, reward in ((0, -1.0), (1, 1.0)):
        values, rewards = imagine(algorithm, [0.0], arm, 0)
        assert rewards == pytest.approx([reward, 0.0], abs=0.1)  # and nothing once it is over
        assert values[1:] == pytest.approx([0.0, 0.0], abs=0.1)


@every_algorithm
def test_a_bandit_that_depends_on_what_is_seen(algo: str) -> None:
    action, value = play(learn(algo, probes.SeenBandit), [-1.0], [1.0])
    assert action.tolist() == [0, 1]
    assert value == pytest.approx([1.0, 1.0], abs=0.2)


class Fork(probes.Probe):
    """Action 0 earns 0.4 at once and nothing later; action 1 nothing, but then another 1 earns 1."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    length = 2

    def see(self) -> Array:
        return np.array([self.t > 0, self.t > 0 and self.first == 1], np.float32)

    def earn(self, action: Any) -> float:
        if self.t == 0:
            self.first = int(action)
            return 0.4 if action == 0 else 0.0
        return float(self.first == 1 and action == 1)


@every_algorithm
def test_a_lure_is_passed_by(algo: str) -> None:
    algorithm = learn(algo, Fork, steps=300)
    start, lured, patient = [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]
    action, value = play(algorithm, start, patient, lured)
    assert action.tolist()[:2] == [1, 1]
    assert value == pytest.approx([GAMMA, 1.0, 0.0], abs=0.2)
    for first in (0, 1):
        for second in (0, 1):
            earned = [0.4 * (first == 0), float(first and second)]
            assert imagine(algorithm, start, first, second)[1] == pytest.approx(earned, abs=0.15)


def test_what_is_left_of_a_terminated_chain() -> None:
    algorithm = learn("muzero", lambda: probes.Chain(truncates=False), n_step=2)
    left = [(1 - GAMMA ** (5 - t)) / (1 - GAMMA) for t in range(5)]
    assert play(algorithm, *np.eye(5).tolist())[1] == pytest.approx(left, rel=0.1)


def test_a_truncated_chain_is_worth_an_endless_one() -> None:
    algorithm = learn("muzero", lambda: probes.Chain(truncates=True), steps=400, target_update_interval=24)
    assert play(algorithm, [1.0])[1] == pytest.approx([1 / (1 - GAMMA)], rel=0.1)


@pytest.mark.parametrize("algo", ["muzero", "gumbel_muzero"])
def test_the_best_of_a_continuum(algo: str) -> None:
    """Search is among samples, so that the policy has to come closer on its own."""
    algorithm = learn(algo, probes.ContinuousBandit, num_sampled_actions=8, steps=250)
    action, _ = play(algorithm, *[[0.0]] * 50)
    assert np.mean((action - 0.5) ** 2) < 0.03
    with torch.no_grad():
        mean = algorithm.model.initial(torch.zeros(1, 1)).policy[0, 0]
    assert torch.tanh(mean).item() == pytest.approx(0.5, abs=0.15)


class Nim(gym.Env):
    """Two players take one or two of the sticks that are left; who takes the last one wins."""

    observation_space = gym.spaces.Dict(
        {"observation": gym.spaces.Box(0.0, 1.0, (6,), np.float32), "action_mask": gym.spaces.MultiBinary(2)}
    )
    action_space = gym.spaces.Discrete(2)
    num_players = 2

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, Array], dict]:
        super().reset(seed=seed)
        self.sticks = 5
        return nim(self.sticks), {}

    def step(self, action: Any) -> tuple[dict[str, Array], float, bool, bool, dict]:
        self.sticks -= int(action) + 1
        assert self.sticks >= 0, "the mask forbids it"
        over = self.sticks == 0
        return nim(self.sticks), float(over), over, False, {}


def nim(sticks: int) -> dict[str, Array]:
    return {"observation": np.eye(6, dtype=np.float32)[sticks], "action_mask": np.array([1, sticks != 1], np.int8)}
