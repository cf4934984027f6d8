"""TRPO trains end to end, and its schedules are seen in the final metrics."""

from __future__ import annotations

import gymnasium as gym
import pytest

from rl_training.runtime.trpo_trainer import train_trpo
from smoke import check_run
from test_spaces_in_training import SPACES


def test_trpo_trains_with_scheduled_entropy_and_trust_region(tiny_config):
    config = tiny_config(
        "trpo",
        ent_coef_schedule={"kind": "linear", "start": 0.02, "end": 0.005},
        max_kl={"kind": "cosine", "start": 0.05, "end": 0.01},
        cg_iterations={"kind": "linear", "start": 10, "end": 5},
    )
    result = train_trpo(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "trpo__CartPole-v1__seed0__smoke"
    assert result.metrics["ent_coef"] == pytest.approx(0.005)
    assert result.metrics["max_kl"] == pytest.approx(0.01)
    assert result.metrics["cg_iterations"] == 5
    reported = {"kl", "accepted", "line_search_steps", "surrogate_improvement", "expected_improvement"}
    assert reported | {"value_loss", "entropy", "explained_variance"} <= result.metrics.keys()
    assert 0 < result.metrics["kl"] <= 0.05
    assert 0 < result.metrics["accepted"] <= 1


@pytest.mark.parametrize("name", SPACES)
def test_images_and_every_action_space(name, tiny_config):
    config = tiny_config("trpo", {"env_id": f"Every{name}-v0", "total_timesteps": 64})
    result = train_trpo(config, progress="silent")
    check_run(result, config)
    assert type(gym.make(config.env_id).action_space) is type(SPACES[name])


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_other_spaces(tiny_config, env_id):
    """Box actions; Discrete observations; Tuple observations."""
    config = tiny_config("trpo", {"env_id": env_id, "total_timesteps": 64})
    check_run(train_trpo(config, progress="silent"), config)
