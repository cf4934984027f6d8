"""APPO trains end to end, and its schedules are seen in the final metrics."""

from __future__ import annotations

import gymnasium as gym
import pytest

from rl_training.runtime.appo_trainer import train_appo
from smoke import check_run
from test_spaces_in_training import SPACES


@pytest.mark.parametrize("clip", ["clip_coef", "clip_range"])
def test_appo_trains_with_a_scheduled_entropy_coefficient_and_clip_range(clip, tiny_config):
    config = tiny_config(
        "appo",
        {"log_interval": 1, "execution": {"simulate_lag": 1}},
        ent_coef_schedule={"kind": "linear", "start": 0.02, "end": 0.005},
        **{f"{clip}_schedule": {"kind": "linear", "start": 0.3, "end": 0.1}},
    )
    result = train_appo(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "appo__CartPole-v1__seed0__smoke"
    assert result.metrics["ent_coef"] == pytest.approx(0.005)
    assert result.metrics["clip_coef"] == pytest.approx(0.1)
    assert result.metrics["gradient_steps"] == 2 * 2 * 256 / (16 * 2)
    assert result.metrics["policy_lag_mean"] == result.metrics["policy_lag_max"] == 1
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"} <= result.metrics.keys()


@pytest.mark.parametrize("name", SPACES)
def test_images_and_every_action_space(name, tiny_config):
    config = tiny_config("appo", {"env_id": f"Every{name}-v0", "total_timesteps": 64})
    result = train_appo(config, progress="silent")
    check_run(result, config)
    assert type(gym.make(config.env_id).action_space) is type(SPACES[name])


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_other_spaces(tiny_config, env_id):
    """Box actions; Discrete observations; Tuple observations."""
    config = tiny_config("appo", {"env_id": env_id, "total_timesteps": 64})
    check_run(train_appo(config, progress="silent"), config)
