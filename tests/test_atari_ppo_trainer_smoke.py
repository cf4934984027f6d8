"""PPO trains on Atari frames, through ale-py's vector environment and through single environments."""

from __future__ import annotations

import pytest

from rl_training.runtime.ppo_trainer import train_ppo
from smoke import check_run

pytest.importorskip("ale_py")


@pytest.mark.parametrize("backend", ["auto", "sync"])
def test_ppo_trains_on_pong_frames(tiny_config, backend):
    env_kwargs = {
        "backend": backend,
        "max_num_frames_per_episode": 200,  # so that an evaluation takes a moment
        "wrappers": {"atari": {"noop_max": 5}, "frame_stack": 4},
    }
    config = tiny_config(
        "ppo",
        {"env_id": "ALE/Pong-v5", "total_timesteps": 32, "env_kwargs": env_kwargs},
        num_steps=8,
        clip_coef_schedule={"kind": "linear", "start": 0.1, "end": 0.05},
    )
    result = train_ppo(config, progress="silent")
    check_run(result, config)
    assert result.metrics["clip_coef"] == pytest.approx(0.05)
