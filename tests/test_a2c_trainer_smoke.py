"""A2C trains end to end, and its schedules are seen in the final metrics."""

from __future__ import annotations

import pytest

from rl_training.runtime.a2c_trainer import train_a2c
from smoke import check_run


def test_a2c_trains_with_a_scheduled_entropy_coefficient(tiny_config):
    config = tiny_config("a2c", entropy_coef_schedule={"kind": "linear", "start": 0.02, "end": 0.01})
    result = train_a2c(config, run_suffix="smoke", progress="silent")
    check_run(result, config)
    assert result.metrics["ent_coef"] == pytest.approx(0.01)
    assert result.metrics["gradient_steps"] == 256 / (8 * 2)
