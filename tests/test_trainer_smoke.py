"""PPO trains end to end, and its schedules are seen in the final metrics."""

from __future__ import annotations

import pytest

from rl_training.runtime.ppo_trainer import train_ppo
from smoke import check_run


def test_ppo_trains_with_scheduled_entropy_and_clip(tiny_config):
    config = tiny_config(
        "ppo",
        ent_coef_schedule={"type": "linear", "start": 0.02, "end": 0.005},
        clip_coef=0.3,
        clip_coef_schedule={"kind": "cosine", "start": 0.3, "end": 0.1},
        learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
    )
    result = train_ppo(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.run_dir.name == "ppo__CartPole-v1__seed0__smoke"
    assert result.metrics["ent_coef"] == pytest.approx(0.005)
    assert result.metrics["clip_coef"] == pytest.approx(0.1)
    assert result.metrics["learning_rate"] == 0.0
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"} <= result.metrics.keys()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_other_spaces(tiny_config, env_id):
    """Box actions; Discrete observations; Tuple observations."""
    config = tiny_config("ppo", {"env_id": env_id, "total_timesteps": 64})
    check_run(train_ppo(config, progress="silent"), config)
