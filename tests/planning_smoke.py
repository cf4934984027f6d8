"""What the smoke tests of all planning algorithms check: schedules, spaces, games of two players, exact resume."""

from __future__ import annotations

from typing import Any

import pytest

from rl_training import TrainResult, resume_training, train
from smoke import check_run
from test_contract import assert_same_future

SCHEDULES: dict[str, Any] = {
    "temperature_schedule": {"kind": "linear", "start": 1.0, "end": 0.25},
    "num_simulations_schedule": {"kind": "linear", "start": 2, "end": 5},
}
IMAGES = {
    "env_id": "ALE/Pong-v5",
    "total_timesteps": 48,
    "eval_episodes": 1,
    "env_kwargs": {
        "backend": "sync",
        "max_num_frames_per_episode": 200,
        "wrappers": {"atari": {"noop_max": 5}, "frame_stack": 2},
    },
}
SELF_PLAY = {"env_id": "TicTacToe-v0", "total_timesteps": 200, "eval_env_kwargs": {"opponent": "random"}}
PENDULUM = {"env_id": "Pendulum-v1", "total_timesteps": 128, "eval_episodes": 1}


def check_schedules(config: Any, run: Any) -> TrainResult:
    """The last values of both schedules are in the final metrics, and each step saw its own."""
    seen = []
    note = lambda run: seen.append((run.step, run.algorithm.temperature, run.algorithm.num_simulations))  # noqa: E731
    result: TrainResult = run(config, run_suffix="smoke", callbacks=[note], progress="silent")
    check_run(result, config)
    assert result.metrics["temperature"] == pytest.approx(0.25)
    assert result.metrics["num_simulations"] == 5
    total = config.total_timesteps
    for step, temperature, simulations in seen:
        progress = min(step, total - 1) / (total - 1)
        assert temperature == pytest.approx(1 - 0.75 * progress)
        assert simulations == round(2 + 3 * progress)
    return result


def check_fixed(config: Any) -> None:
    metrics = train(config, progress="silent").metrics
    assert (metrics["temperature"], metrics["num_simulations"]) == (0.5, 4)


def check_resume(config: Any, stop_at: int) -> TrainResult:
    """Stopped and resumed, a run ends in the same state."""
    whole = train(config, progress="silent")
    half = train(
        config, callbacks=[lambda run: run.stop("half way") if run.step >= stop_at else None], progress="silent"
    )
    resumed = resume_training(half.checkpoint_path, progress="silent")
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    return whole
