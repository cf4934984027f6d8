"""Running statistics and normalisation against NumPy on everything seen."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs_for_tests import CounterEnv
from rl_training.data.normalize import Normalizer, RunningMeanStd
from rl_training.envs.backends import VectorEnvs
from rl_training.envs.episodes import Episodes, SyncEnvs
from rl_training.envs.runner import EnvRunner
from rl_training.types import Decision

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_running_statistics_equal_numpy(shape):
    rng = np.random.default_rng(0)
    batches = [rng.normal(50.0, 3.0, (size, *shape)) for size in (1, 7, 2, 30)]
    statistics = RunningMeanStd(shape)
    for batch in batches:
        statistics.update(batch)
    everything = np.concatenate(batches)
    np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(statistics.var, everything.var(0), rtol=1e-10)
    assert statistics.count == 40


def test_empty_batches_and_no_batches():
    statistics = RunningMeanStd((2,))
    statistics.update(np.zeros((0, 2)))
    assert statistics.count == 0
    assert statistics.var.tolist() == [1.0, 1.0]


def test_observations_are_centred_scaled_and_clipped():
    rng = np.random.default_rng(2)
    normalizer = Normalizer(BOX, 4, reward=False)
    seen = rng.normal([1.0, -5.0, 100.0], [1.0, 3.0, 0.5], (50, 4, 3)).astype(np.float32)
    for obs in seen:
        normalizer.observe(obs)
    rows = seen.reshape(-1, 3).astype(np.float64)
    obs = np.concatenate([seen[-1], [[1e6, -1e6, 100.0]]]).astype(np.float32)
    expected = np.clip((obs - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8), -10, 10)
    result = normalizer.observation(obs)
    np.testing.assert_allclose(result, expected, atol=1e-4)
    assert result.dtype == np.float32
    assert result[-1, :2].tolist() == [10.0, -10.0]


def test_only_float_boxes_are_touched():
    space = spaces.Dict({"image": spaces.Box(0, 255, (2,), np.uint8), "n": spaces.Discrete(3), "x": BOX})
    normalizer = Normalizer(space, 1)
    obs = {"image": np.array([[9, 9]], np.uint8), "n": np.array([2]), "x": np.ones((1, 3), np.float32)}
    normalizer.observe(obs)
    result = normalizer.observation(obs)
    assert result["image"] is obs["image"]
    assert result["n"] is obs["n"]
    assert result["x"].tolist() == [[0.0, 0.0, 0.0]]
    assert normalizer.space(space)["x"] == spaces.Box(-10, 10, (3,), np.float32)
    assert normalizer.space(space)["image"] == space["image"]
    image = spaces.Box(0, 255, (2,), np.uint8)
    assert Normalizer(image, 1).observation(obs["image"]) is obs["image"]
    assert Normalizer(image, 1).space(image) == image


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    rng = np.random.default_rng(3)
    normalizer = Normalizer(BOX, 3, observation=False, gamma=0.5)
    normalizer.gamma = 0.9
    running, returns = np.zeros(3), []
    for _ in range(40):
        reward, done = rng.normal(2.0, 1.0, 3).astype(np.float32), rng.random(3) < 0.2
        running = 0.9 * running + reward
        returns.append(running.copy())
        scale = np.sqrt(np.concatenate(returns).var() + 1e-8)
        np.testing.assert_allclose(
            normalizer.reward(reward, done), np.clip(reward / scale, -10, 10), rtol=1e-5, atol=1e-6
        )
        running = np.where(done, 0.0, running)


def test_dead_rows_leave_no_trace_in_the_reward():
    with_dead, without = (Normalizer(BOX, 2, observation=False) for _ in range(2))
    live = np.array([True, False])
    for reward in (1.0, 3.0, -2.0):
        with_dead.reward(np.array([reward, 5.0], np.float32) * live, np.zeros(2, bool), live)
        one = Normalizer.reward(without, np.array([reward, 0.0], np.float32), np.zeros(2, bool), live)
    assert with_dead.state_dict()["reward"]["count"] == 3
    assert with_dead.state_dict()["returns"][1] == 0.0
    assert one.dtype == np.float32


def test_a_row_that_is_not_live_does_not_age_the_return_under_way():
    normalizer, rows = Normalizer(BOX, 2, observation=False, gamma=0.5), np.zeros(2, bool)
    normalizer.reward(np.array([4.0, 4.0], np.float32), rows)
    normalizer.reward(np.array([1.0, 0.0], np.float32), rows, np.array([True, False]))
    normalizer.reward(np.array([1.0, 1.0], np.float32), rows)
    assert normalizer.state_dict()["returns"].tolist() == [(4 * 0.5 + 1) * 0.5 + 1, 4 * 0.5 + 1]


def test_state_survives_and_other_parts_are_refused():
    normalizer, other = Normalizer(BOX, 2), Normalizer(BOX, 2)
    normalizer.observe(np.arange(6, dtype=np.float32).reshape(2, 3))
    normalizer.reward(np.array([1.0, 2.0], np.float32), np.zeros(2, bool))
    other.load_state_dict(normalizer.state_dict())
    obs = np.ones((2, 3), np.float32)
    assert np.array_equal(normalizer.observation(obs), other.observation(obs))
    reward = np.array([3.0, 1.0], np.float32)
    done = np.zeros(2, bool)
    assert np.array_equal(normalizer.reward(reward, done), other.reward(reward, done))
    with pytest.raises(ValueError, match=r"env_kwargs\.wrappers"):
        Normalizer(BOX, 2, reward=False).load_state_dict(normalizer.state_dict())
    with pytest.raises(ValueError, match="shape"):
        Normalizer(spaces.Box(-1, 1, (2,), np.float32), 2).load_state_dict(normalizer.state_dict())


def stay(obs, memory, *, explore, rng):
    return Decision(np.zeros(2, np.int64), {}, {})


def runner_of(backend, training=True, normalizer=None):
    make = [lambda: CounterEnv(3), lambda: CounterEnv(2)]
    if backend == "sync":
        envs = SyncEnvs([lambda i=i, one=one: Episodes(one(), seed=0, index=i) for i, one in enumerate(make)])
    else:
        envs = VectorEnvs(SyncVectorEnv(make, autoreset_mode=AutoresetMode.NEXT_STEP))
    normalizer = normalizer or Normalizer(envs.single_observation_space, 2)
    return EnvRunner(envs, seed=0, normalizer=normalizer, training=training)


@pytest.mark.parametrize("backend", ["sync", "next_step"])
def test_each_observation_acted_on_is_counted_once(backend):
    runner = runner_of(backend)
    live = sum(runner.step(stay) is not None and runner.live_steps for _ in range(12))
    state = runner.normalizer.state_dict()
    waiting = 0 if backend == "sync" else int((~runner.first & (runner.envs._waiting)).sum())
    assert state["reward"]["count"] == live
    assert state["observation"][""]["count"] == live + 2 - waiting, "those acted on, and those to be acted on next"


def test_successor_and_next_observation_share_their_statistics():
    runner = runner_of("sync")
    for _ in range(7):
        step = runner.step(stay)
        goes_on = ~(step["terminated"] | step["truncated"])
        assert np.array_equal(step["next_obs"][goes_on], runner.obs[goes_on])
        assert runner.statistics.finished == [] or not np.array_equal(step["next_obs"], runner.obs) or goes_on.all()


def test_evaluation_uses_frozen_statistics_and_raw_rewards():
    training = runner_of("sync")
    for _ in range(5):
        training.step(stay)
    before = training.normalizer.state_dict()
    evaluation = runner_of("sync", training=False, normalizer=training.normalizer)
    rewards = [evaluation.step(stay)["reward"].copy() for _ in range(4)]
    after = training.normalizer.state_dict()
    assert rewards[0].tolist() == [10.0, 10.0]
    assert np.abs(evaluation.obs).max() <= 10.0
    assert after["observation"][""]["count"] == before["observation"][""]["count"]
    assert np.array_equal(after["returns"], before["returns"])
