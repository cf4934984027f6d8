"""What every trainer that plans is put through: schedules, images, continuous actions, self-play, exact resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_training import TrainConfig, TrainResult, resume_training, train
from rl_training.runtime.checkpoints import load_checkpoint
from smoke import check_run
from test_contract import assert_same_future

SCHEDULES: dict[str, Any] = {
    "temperature_schedule": {"kind": "cosine", "start": 1.0, "end": 0.1},
    "num_simulations_schedule": {"kind": "linear", "start": 2, "end": 5},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of the config, and of the learner
    "vectors": ({}, {}),
    "images": (
        {
            "env_id": "ALE/Pong-v5",
            "total_timesteps": 48,
            "eval_episodes": 1,
            "env_kwargs": {
                "backend": "sync",
                "max_num_frames_per_episode": 100,
                "wrappers": {"atari": {"noop_max": 5}, "frame_stack": 4},
            },
        },
        {"learning_starts": 16, "batch_size": 4, "utd_ratio": 0.1, "buffer_capacity": 60},
    ),
    "continuous": ({"env_id": "Pendulum-v1", "eval_episodes": 1}, {}),
    "self-play": (
        {"env_id": "TicTacToe-v0", "eval_env_kwargs": {"opponent": "random"}, "eval_episodes": 10},
        {"value_limit": 0, "reward_limit": 0, "gamma": 1.0},
    ),
}


def smoke_config(tiny_config: Any, algo: str, case: str, **changes: Any) -> TrainConfig:
    if case == "images":
        pytest.importorskip("ale_py")
    config, kwargs = CASES[case]
    return tiny_config(algo, config, **{**kwargs, **changes})


def check_schedules(result: TrainResult) -> None:
    """Both numbers are where their schedules end."""
    assert result.metrics["temperature"] == pytest.approx(0.1)
    assert result.metrics["num_simulations"] == 5


def check_resume(tiny_config: Any, algo: str, case: str, **changes: Any) -> None:
    """A run that was stopped half way goes on as if it had not been, its schedules too."""
    config = smoke_config(tiny_config, algo, case, **SCHEDULES, **changes)
    half = config.total_timesteps // 2 + 2
    whole = train(config, progress="silent")
    stopped = train(
        config, callbacks=[lambda run: run.stop("half way") if run.step >= half else None], progress="silent"
    )
    assert stopped.metrics["global_step"] < config.total_timesteps
    assert stopped.metrics["gradient_steps"] > 0
    resumed = resume_training(stopped.checkpoint_path, progress="silent")
    check_schedules(resumed)
    assert_same_future(whole.checkpoint_path, resumed.checkpoint_path)
    assert resumed.metrics["eval_return_mean"] == whole.metrics["eval_return_mean"]


def check_self_play(tiny_config: Any, algo: str) -> None:
    """Both sides are learned, no move is illegal, and an opponent is there only in evaluation."""
    config = smoke_config(tiny_config, algo, "self-play", **SCHEDULES)
    seen: list[int] = []
    result = train(config, callbacks=[lambda run: seen.append(run.source.spaces[0].num_players)], progress="silent")
    check_run(result, config)
    check_schedules(result)
    assert set(seen) == {2}
    assert -1 <= result.metrics["eval_return_min"] <= result.metrics["eval_return_mean"] <= 1
    replay = load_checkpoint(result.checkpoint_path).state["replay"]
    reward, ended = (np.concatenate(replay["columns"][key]) for key in ("reward", "terminated"))
    assert (reward >= 0).all()  # an illegal move would have lost at once
    assert reward[ended].sum() > 0
    assert not reward[~ended].any()
    assert 4 < result.metrics["train_length_mean"] <= 9  # nor is a game over before someone could have won
