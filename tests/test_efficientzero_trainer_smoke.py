"""efficientzero trains end to end: schedules, images, self-play with legal moves; every run resumes exactly."""

from __future__ import annotations

import pytest

from planning_smoke import IMAGES, SCHEDULES, SELF_PLAY, check_fixed, check_resume, check_schedules
from rl_training.runtime.efficientzero_trainer import train_efficientzero


def test_schedules_of_temperature_and_num_simulations_are_in_the_metrics(tiny_config):
    result = check_schedules(tiny_config("efficientzero", **SCHEDULES), train_efficientzero)
    assert result.run_dir.name == "efficientzero__CartPole-v1__seed0__smoke"
    assert {"policy_loss", "value_loss", "reward_loss", "consistency_loss", "grad_norm"} <= result.metrics.keys()


def test_fixed_values_still_work(tiny_config):
    check_fixed(tiny_config("efficientzero", {"total_timesteps": 64}, temperature=0.5, num_simulations=4))


def test_images(tiny_config):
    pytest.importorskip("ale_py")
    check_resume(tiny_config("efficientzero", IMAGES, learning_starts=16, num_simulations=2, n_step=2), 32)


def test_self_play(tiny_config):
    """Masks of legal moves; evaluated against an opponent."""
    result = check_resume(tiny_config("efficientzero", SELF_PLAY, value_limit=0, reward_limit=0, gamma=1.0), 120)
    assert -1 <= result.metrics["eval_return_mean"] <= 1
