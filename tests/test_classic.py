"""Cart-pole with a fixed horizon: Gymnasium's until the pole falls, and never over before the time limit."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rl_training import resume_training, train
from test_contract import assert_same_future

ENV = "CartPoleFixedHorizon-v0"


@pytest.mark.parametrize("policy", ["random", "left", "swing"])
def test_every_episode_takes_500_steps_and_stays_in_its_space(policy):
    env, rng = gym.make(ENV, disable_env_checker=True), np.random.default_rng(0)
    total = 0.0
    obs, _ = env.reset(seed=1)
    for step in range(500):
        action = {"random": rng.integers(2), "left": 0, "swing": int(obs[3] > 0)}[policy]
        obs, reward, terminated, truncated, _ = env.step(int(action))
        assert env.observation_space.contains(obs), obs
        upright = abs(obs[2]) <= 12 * 2 * np.pi / 360 and abs(obs[0]) <= 2.4
        assert reward == float(upright)
        assert not terminated
        assert truncated == (step == 499)
        total += reward
    assert total < 250


def test_it_is_gymnasiums_until_the_pole_falls():
    ours, theirs = gym.make(ENV), gym.make("CartPole-v1")
    ours.action_space.seed(0)
    np.testing.assert_array_equal(ours.reset(seed=4)[0], theirs.reset(seed=4)[0])
    while True:
        action = ours.action_space.sample()
        obs, reward, *_ = ours.step(action)
        expected, _, fallen, _, _ = theirs.step(action)
        np.testing.assert_allclose(obs, expected, atol=1e-6)
        assert reward == float(not fallen)
        if fallen:
            break


def test_the_cart_stops_at_the_end_of_its_track():
    env = gym.make(ENV)
    env.reset(seed=0)
    seen = [env.step(0)[0] for _ in range(200)]
    assert seen[-1][0] == pytest.approx(-4.8)
    assert min(x[0] for x in seen) >= -4.8 - 1e-6


def test_a_run_in_it_resumes_exactly(tiny_config):
    config = {"env_id": ENV, "total_timesteps": 256}
    whole = train(tiny_config("ppo", config), progress="silent")
    half = train(tiny_config("ppo", {**config, "total_timesteps": 128, "schedule_horizon": 256}), progress="silent")
    resumed = resume_training(half.run_dir, total_timesteps=256, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
