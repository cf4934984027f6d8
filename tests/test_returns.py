"""Advantages and n-step sums against their definitions, closed forms and Stable-Baselines3's rollout buffer."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.algorithms import planning_targets
from rl_training.ops import returns
from rl_training.types import Array

GAMMA, LAMBDA = 0.97, 0.9


def gae(*, gamma: float, gae_lambda: float, **data: Array) -> Array:
    tensors = {key: torch.from_numpy(x) for key, x in data.items()}
    return returns.gae(**tensors, gamma=gamma, gae_lambda=gae_lambda).numpy()


def random_rollout(rng: np.random.Generator, num_steps: int, num_envs: int, ends: float = 0.2) -> dict[str, Array]:
    """Values are consistent: where an episode goes on, next_value[t] is value[t + 1]."""
    shape = (num_steps, num_envs)
    value = rng.standard_normal(shape, dtype=np.float32)
    terminated, truncated = rng.random(shape) < ends, rng.random(shape) < ends
    next_value = np.concatenate([value[1:], rng.standard_normal((1, num_envs), dtype=np.float32)])
    final_value = rng.standard_normal(shape, dtype=np.float32)
    next_value = np.where(truncated, final_value, next_value)
    return {
        "reward": rng.standard_normal(shape, dtype=np.float32),
        "value": value,
        "next_value": next_value,
        "terminated": terminated,
        "truncated": truncated,
    }


def gae_by_definition(data: dict[str, Array], gamma: float, gae_lambda: float) -> Array:
    """A[t] = sum over l of (gamma lambda)^l delta[t + l], up to the end of t's episode; in float64."""
    reward, value, next_value = (data[key].astype(np.float64) for key in ("reward", "value", "next_value"))
    delta = reward + gamma * next_value * ~data["terminated"] - value
    advantage = np.zeros_like(delta)
    for t in range(len(delta)):
        for n in range(delta.shape[1]):
            for k in range(t, len(delta)):
                advantage[t, n] += (gamma * gae_lambda) ** (k - t) * delta[k, n]
                if data["terminated"][k, n] or data["truncated"][k, n]:
                    break
    return advantage


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 8), (37, 4), (128, 2)])
def test_gae_is_its_definition(shape: tuple[int, int]) -> None:
    data = random_rollout(np.random.default_rng(0), *shape, ends=0.05)
    advantage = gae(**data, gamma=GAMMA, gae_lambda=LAMBDA)
    assert advantage.dtype == np.float32
    np.testing.assert_allclose(advantage, gae_by_definition(data, GAMMA, LAMBDA), atol=1e-5)


def test_gae_is_that_of_stable_baselines3() -> None:
    from stable_baselines3.common.buffers import RolloutBuffer

    num_steps, num_envs = 50, 4
    data = random_rollout(np.random.default_rng(1), num_steps, num_envs)
    space = gym.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(num_steps, space, space, "cpu", gae_lambda=LAMBDA, gamma=GAMMA, n_envs=num_envs)
    start = np.ones(num_envs)
    for t in range(num_steps):
        # Its convention for truncation: the value of the last state is part of the reward.
        bootstrap = GAMMA * data["next_value"][t] * (data["truncated"][t] & ~data["terminated"][t])
        nothing = np.zeros((num_envs, 1))
        value = torch.from_numpy(data["value"][t])
        buffer.add(nothing, nothing, data["reward"][t] + bootstrap, start, value, torch.zeros(num_envs))
        start = (data["terminated"][t] | data["truncated"][t]).astype(np.float32)
    buffer.compute_returns_and_advantage(torch.from_numpy(data["next_value"][-1]), start)
    np.testing.assert_allclose(gae(**data, gamma=GAMMA, gae_lambda=LAMBDA), buffer.advantages, atol=1e-5)


def test_lambda_zero_is_the_td_error() -> None:
    data = random_rollout(np.random.default_rng(2), 20, 3)
    delta = data["reward"] + GAMMA * data["next_value"] * ~data["terminated"] - data["value"]
    np.testing.assert_allclose(gae(**data, gamma=GAMMA, gae_lambda=0.0), delta, atol=1e-6)


def test_lambda_one_is_the_discounted_return_minus_the_value() -> None:
    data = random_rollout(np.random.default_rng(3), 20, 3, ends=0.0)
    following = data["next_value"][-1].astype(np.float64)
    returns = np.zeros((20, 3))
    for t in reversed(range(20)):
        following = returns[t] = data["reward"][t] + GAMMA * following
    np.testing.assert_allclose(gae(**data, gamma=GAMMA, gae_lambda=1.0), returns - data["value"], atol=1e-5)


def test_nothing_leaks_from_the_episode_that_follows() -> None:
    data: dict[str, Any] = random_rollout(np.random.default_rng(4), 10, 2, ends=0.0)
    data["terminated"][4, 0] = data["truncated"][4, 1] = True
    before = gae(**data, gamma=GAMMA, gae_lambda=LAMBDA)
    data["reward"][5:] += 100.0
    after = gae(**data, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_array_equal(before[:5], after[:5])
    data["next_value"][4] += 100.0
    bootstrapped = gae(**data, gamma=GAMMA, gae_lambda=LAMBDA)
    assert bootstrapped[4, 0] == after[4, 0]  # terminated: no next state
    assert bootstrapped[4, 1] == pytest.approx(after[4, 1] + 100 * GAMMA, rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 20),
    num_envs=st.integers(1, 3),
    ends=st.floats(0, 1),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)
def test_gae_is_its_definition_for_any_numbers(
    seed: int, num_steps: int, num_envs: int, ends: float, gamma: float, gae_lambda: float
) -> None:
    data = random_rollout(np.random.default_rng(seed), num_steps, num_envs, ends)
    before = {key: x.copy() for key, x in data.items()}
    advantage = gae(**data, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(advantage, gae_by_definition(data, gamma, gae_lambda), atol=2e-5)
    for key, x in before.items():
        np.testing.assert_array_equal(x, data[key])


def test_backward_sum_is_its_recursion() -> None:
    rng = np.random.default_rng(5)
    x, decay = rng.standard_normal((33, 2)), rng.random((33, 2))
    y, following = np.zeros_like(x), np.zeros(2)
    for t in reversed(range(33)):
        following = y[t] = x[t] + decay[t] * following
    ours = returns.backward_sum(torch.from_numpy(x), torch.from_numpy(decay)).numpy()
    np.testing.assert_allclose(ours, y, rtol=1e-12)


def naive_after(steps: int, n: int, k: int) -> int:
    """Walk on from step k, up to n times, over steps that are known."""
    count = 0
    while count < n and k + count < steps:
        count += 1
    return count


sequences_of_any_length = given(
    data=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 10)), min_size=1, max_size=6),
    count=st.integers(1, 6),
)


@settings(max_examples=100, deadline=None)
@sequences_of_any_length
def test_bootstrapping_comes_n_steps_later_or_after_the_last_known_step(
    data: list[tuple[int, int]], count: int
) -> None:
    steps, n = (np.array(column) for column in zip(*data, strict=True))
    after = planning_targets.bootstrap_after(steps, n, count)
    assert after.shape == (len(data), count)
    assert after.tolist() == [[naive_after(*row, k) for k in range(count)] for row in data]
    same = planning_targets.bootstrap_after(steps, 3, count)
    np.testing.assert_array_equal(same, planning_targets.bootstrap_after(steps, np.full(len(data), 3), count))


def test_bootstrapping_by_hand() -> None:
    """Five known steps, n = 3: each of their rewards is summed."""
    assert planning_targets.bootstrap_after(np.array([5]), 3, 7).tolist() == [[3, 3, 3, 2, 1, 0, 0]]


@pytest.mark.parametrize("discount", [0.9, 1.0, -1.0, -0.9, 0.0])
def test_n_step_sums_are_their_definition(discount: float) -> None:
    rng = np.random.default_rng(0)
    reward = rng.standard_normal((20, 14), dtype=np.float32)
    after = rng.integers(0, 11, (20, 4))
    total = planning_targets.n_step_sum(reward, after, discount)
    assert total.dtype == np.float32
    for b in range(20):
        for k in range(4):
            expected = sum(discount**i * float(reward[b, k + i]) for i in range(after[b, k]))
            assert total[b, k] == pytest.approx(expected, abs=1e-5)


def test_n_step_sums_see_nothing_beyond() -> None:
    reward = np.arange(1, 9, dtype=np.float32)[None].repeat(2, 0)
    after = np.array([[2, 1, 0], [0, 0, 3]])
    before = reward.copy()
    expected = planning_targets.n_step_sum(reward, after, 0.5)
    np.testing.assert_array_equal(expected, [[2.0, 2.0, 0.0], [0.0, 0.0, 3 + 2 + 1.25]])
    np.testing.assert_array_equal(reward, before)
    reward[0, 2:], reward[1, :2], reward[1, 5:] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(planning_targets.n_step_sum(reward, after, 0.5), expected)
    assert not planning_targets.n_step_sum(reward, np.zeros((2, 3), np.int64), 0.5).any()
