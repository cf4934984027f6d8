"""The probe ladder for planning: rewards, values and actions of tiny environments, as the model learns them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import probes
from build import build, make_replay
from rl_training import ALGORITHMS
from rl_training.types import Array, Spaces

GAMMA = 0.9
NUM_ENVS = 8
HP: dict[str, Any] = {
    "hidden_sizes": (32,),
    "latent_size": 8,
    "value_limit": 5,
    "reward_limit": 3,
    "num_simulations": 8,
    "unroll_steps": 2,
    "n_step": 5,
    "batch_size": 32,
    "buffer_capacity": 10_000,
    "learning_starts": 64,
    "learning_rate": 5e-3,
    "weight_decay": 1e-4,
    "value_coef": 1.0,
    "gamma": GAMMA,
    "utd_ratio": 0.25,
    "target_update_interval": 80,
    "temperature": 1.0,
    "reanalyse_ratio": 0.0,
    "priority_exponent": 0.6,
    "beta": 0.4,
}
OWN: dict[str, dict[str, Any]] = {"muzero": {}, "gumbel_muzero": {}, "efficientzero": {"reanalyse_ratio": 0.05}}
every_algorithm = pytest.mark.parametrize("algo", OWN)


def learn(algo: str, env: Callable[[], gym.Env], *, steps: int = 250, **changes: Any) -> Any:
    torch.manual_seed(0)
    runner = probes.ProbeRunner([env() for _ in range(NUM_ENVS)])
    hp = ALGORITHMS[algo].recipe.hyperparameters(**{**HP, **OWN[algo], **changes})
    learner = build(algo, runner.spaces, hp)
    replay, first = make_replay(algo, learner, runner.spaces, NUM_ENVS), np.ones(NUM_ENVS, bool)
    for _ in range(steps):
        step = runner.step(learner.actor)
        replay.add({**step, "first": first})
        first = step["terminated"] | step["truncated"]
        learner.learn(replay)
    return learner


def play(learner: Any, *obs: list[float]) -> Array:
    """Actions of a search without noise."""
    seen = np.array(obs, np.float32)
    return learner.actor.act(seen, {}, explore=False, rng=np.random.default_rng(0)).action


@torch.no_grad()
def imagine(learner: Any, obs: list[float], *actions: int) -> tuple[list[float], list[float]]:
    """(values, rewards) along actions from an observation, without looking at another one."""
    said = learner.model.initial(torch.tensor([obs]))
    values, rewards = [said.value.item()], []
    for action in actions:
        said = learner.model.recurrent(said.state, torch.tensor([action]))
        values.append(said.value.item())
        rewards.append(said.reward.item())
    return values, rewards


@every_algorithm
def test_a_bandit_of_one_step(algo: str) -> None:
    learner = learn(algo, probes.Bandit)
    assert play(learner, [0.0]).tolist() == [1]
    for arm, reward in ((0, -1.0), (1, 1.0)):
        values, rewards = imagine(learner, [0.0], arm, 0)
        assert rewards == pytest.approx([reward, 0.0], abs=0.25)  # and nothing once it is over
        assert values[1:] == pytest.approx([0.0, 0.0], abs=0.1)


@every_algorithm
def test_a_bandit_that_depends_on_what_is_seen(algo: str) -> None:
    assert play(learn(algo, probes.SeenBandit), [-1.0], [1.0]).tolist() == [0, 1]


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
    learner = learn(algo, Fork, buffer_capacity=1500)
    start, patient = [0.0, 0.0], [1.0, 1.0]
    assert play(learner, start, patient).tolist() == [1, 1]
    values, rewards = imagine(learner, start, 1, 1)
    assert rewards == pytest.approx([0.0, 1.0], abs=0.2)
    assert values[0] > 0.5


def test_what_is_left_of_a_terminated_chain() -> None:
    learner = learn("muzero", lambda: probes.Chain(truncates=False), n_step=3)
    left = [(1 - GAMMA ** (5 - t)) / (1 - GAMMA) for t in range(5)]
    assert [imagine(learner, obs)[0][0] for obs in np.eye(5).tolist()] == pytest.approx(left, rel=0.1)


def test_a_truncated_chain_is_worth_an_endless_one() -> None:
    learner = learn("muzero", lambda: probes.Chain(truncates=True), steps=400, target_update_interval=24)
    assert imagine(learner, [1.0])[0][0] == pytest.approx(1 / (1 - GAMMA), rel=0.1)


class LateReward(probes.Probe):
    """Five steps, the last of which truncates the episode and earns 1 if the first action was 1, else nothing.

    Both ways end in the same observation: whatever it is worth, they differ by the discounted reward.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (6,), np.float32)
    length = 5

    def see(self) -> Array:
        if self.t == self.length:
            return np.zeros(6, np.float32)
        return np.array([*np.eye(5)[self.t], self.t > 0 and self.first == 1], np.float32)

    def earn(self, action: Any) -> float:
        if self.t == 0:
            self.first = int(action)
        return float(self.t == self.length - 1 and self.first == 1)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict]:
        obs, reward, over, _, info = super().step(action)
        return obs, reward, False, over, info


def test_a_reward_that_comes_with_the_truncation() -> None:
    """The search is too short to see the reward, and the model is unrolled for fewer steps: only values can tell."""
    learner = learn("muzero", LateReward, num_simulations=3, n_step=5)
    assert play(learner, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).tolist() == [1]
    for t in range(1, 5):
        right, wrong = (imagine(learner, [*np.eye(5)[t].tolist(), first])[0][0] for first in (1.0, 0.0))
        assert right - wrong == pytest.approx(GAMMA ** (4 - t), abs=0.25)


class Slope(probes.ContinuousBandit):
    """The larger the action, the better."""

    def earn(self, action: Any) -> float:
        return float(action[0])


@pytest.mark.parametrize("algo", ["muzero", "gumbel_muzero"])
def test_the_best_of_a_continuum(algo: str) -> None:
    learner = learn(algo, Slope, num_sampled_actions=6, steps=200)
    assert play(learner, *[[0.0]] * 50).mean() > 0.7
    with torch.no_grad():
        assert learner.model.initial(torch.zeros(1, 1)).policy[0, 0] > 0.5  # the policy has followed the search


class Nim(gym.Env):
    """Two players take one or two of five sticks in turns; who takes the last one wins. Three or none left are lost."""

    observation_space = gym.spaces.Box(0.0, 1.0, (6,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Array, dict]:
        super().reset(seed=seed)
        self.sticks = int(self.np_random.integers(1, 6))
        return self.see(), {}

    def see(self) -> Array:
        return np.eye(6, dtype=np.float32)[self.sticks]

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict]:
        self.sticks = max(0, self.sticks - int(action) - 1)
        return self.see(), float(self.sticks == 0), self.sticks == 0, False, {}


@every_algorithm
def test_a_game_of_two(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nim by self-play: of 4 sticks take 1, of 5 take 2, and with 3 left the game is lost."""
    monkeypatch.setattr(probes, "Spaces", functools.partial(Spaces, num_players=2))
    learner = learn(algo, Nim, value_limit=0, reward_limit=0, gamma=1.0)
    one, two, three, four, five = np.eye(6, dtype=np.float32)[1:].tolist()
    assert play(learner, two, four, five).tolist() == [1, 0, 1]
    values = [imagine(learner, obs)[0][0] for obs in (one, two, three, four, five)]
    assert min(values[0], values[1]) > 0.25
    assert values[2] < -0.25
