"""IMPALA trains end to end, and its schedules are seen in the final metrics."""

from __future__ import annotations

import gymnasium as gym
import pytest

from rl_training.runtime.impala_trainer import train_impala
from smoke import check_run
from test_spaces_in_training import SPACES


def test_impala_trains_with_a_scheduled_entropy_coefficient_and_clip(tiny_config):
    config = tiny_config(
        "impala",
        {"log_interval": 1},
        ent_coef_schedule={"kind": "linear", "start": 0.02, "end": 0.005},
        rho_bar={"kind": "cosine", "start": 2.0, "end": 1.0},
        num_minibatches=2,
    )
    result = train_impala(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "impala__CartPole-v1__seed0__smoke"
    assert result.metrics["ent_coef"] == pytest.approx(0.005)
    assert result.metrics["rho_bar"] == pytest.approx(1.0)
    assert result.metrics["gradient_steps"] == 2 * 256 / (8 * 2)
    assert result.metrics["policy_lag_mean"] == result.metrics["policy_lag_max"] == 0
    assert {"policy_loss", "value_loss", "entropy", "explained_variance", "ratio_mean"} <= result.metrics.keys()


@pytest.mark.parametrize("name", SPACES)
def test_images_and_every_action_space(name, tiny_config):
    config = tiny_config("impala", {"env_id": f"Every{name}-v0", "total_timesteps": 64})
    result = train_impala(config, progress="silent")
    check_run(result, config)
    assert type(gym.make(config.env_id).action_space) is type(SPACES[name])


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_other_spaces(tiny_config, env_id):
    """Box actions; Discrete observations; Tuple observations."""
    config = tiny_config("impala", {"env_id": env_id, "total_timesteps": 64})
    check_run(train_impala(config, progress="silent"), config)
