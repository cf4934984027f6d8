"""Recurrent PPO trains end to end, in every space, and its schedules are seen in the final metrics."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rl_training import ConfigError, load_policy, train
from rl_training.runtime.recurrent_ppo_trainer import train_recurrent_ppo
from smoke import check_run

HIDDEN = {"env_id": "CartPoleNoVelocity-v1"}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_ppo_trains_with_scheduled_entropy_and_clip(tiny_config, cell):
    config = tiny_config(
        "recurrent_ppo",
        HIDDEN,
        cell=cell,
        ent_coef_schedule={"kind": "linear", "start": 0.02, "end": 0.005},
        clip_coef_schedule={"kind": "cosine", "start": 0.3, "end": 0.1},
        num_minibatches={"kind": "linear", "start": 2, "end": 1},
    )
    result = train_recurrent_ppo(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "recurrent_ppo__CartPoleNoVelocity-v1__seed0__smoke"
    assert result.metrics["ent_coef"] == pytest.approx(0.005)
    assert result.metrics["clip_coef"] == pytest.approx(0.1)
    assert result.metrics["num_minibatches"] == 1
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"} <= result.metrics.keys()


@pytest.mark.parametrize("critic_memory", ["separate", "shared", "none"])
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_other_spaces(tiny_config, env_id, critic_memory):
    """Box actions; Discrete observations; Tuple observations."""
    config = tiny_config("recurrent_ppo", {"env_id": env_id, "total_timesteps": 64}, critic_memory=critic_memory)
    check_run(train(config, progress="silent"), config)


def test_more_minibatches_than_environments_are_an_error_and_the_default_adapts(tiny_config):
    schedule = {"kind": "linear", "start": 1, "end": 3}
    for value, most in ((3, 3), (schedule, 3)):
        with pytest.raises(ConfigError, match=rf"num_minibatches: reaches {most}, .* num_envs is 2: lower it or raise"):
            train(tiny_config("recurrent_ppo", num_minibatches=value), progress="silent")
    config = tiny_config("recurrent_ppo", {"total_timesteps": 32})
    del config.algo_kwargs["num_minibatches"]
    assert train(config, progress="silent").metrics["gradient_steps"] == 2 * 2  # epochs times environments


def test_a_loaded_policy_remembers_and_forgets_row_by_row(tiny_config):
    policy = load_policy(train(tiny_config("recurrent_ppo", HIDDEN), progress="silent").run_dir)
    rng = np.random.default_rng(0)
    obs = [rng.uniform(-0.2, 0.2, (2, 4)).astype(np.float32) for _ in range(2)]
    policy.act(obs[0])
    policy.reset([1])
    policy.act(obs[1])
    after = policy.memory["policy"]
    policy.reset()
    for step in obs:
        policy.act(step[:1])
    np.testing.assert_allclose(after[:1], policy.memory["policy"], atol=1e-6)
    policy.reset()
    policy.act(obs[1][1:])
    np.testing.assert_allclose(after[1:], policy.memory["policy"], atol=1e-6)
    with pytest.raises(ValueError, match=r"2 observations, but the memory is that of 1 environments: .*reset"):
        policy.act(obs[0])


def test_cartpole_hides_its_velocities_and_is_otherwise_the_same():
    hidden, seen = gym.make("CartPoleNoVelocity-v1"), gym.make("CartPole-v1")
    assert hidden.spec.max_episode_steps == seen.spec.max_episode_steps
    np.testing.assert_array_equal(hidden.reset(seed=3)[0], seen.reset(seed=3)[0] * [1, 0, 1, 0])
    over = False
    while not over:
        ours, theirs = (env.step(1) for env in (hidden, seen))
        np.testing.assert_array_equal(ours[0], theirs[0] * np.float32([1, 0, 1, 0]))
        assert theirs[0][[1, 3]].all()
        assert hidden.observation_space.contains(ours[0])
        assert ours[1:] == theirs[1:]
        over = ours[2]
