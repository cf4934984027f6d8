"""Shared by all tests: one torch thread, and one small run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training import TrainConfig

REPOSITORY = Path(__file__).parents[1]
TINY: dict[str, dict[str, Any]] = {  # sizes that make an algorithm's run take a moment
    "a2c": {"num_steps": 8},
    "ppo": {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_config(tmp_path: Path) -> Any:
    """`tiny_config("ppo", clip_coef=0.3)`: a config of a few hundred steps; keys of TrainConfig go into `config`."""

    def make(algo: str, config: dict[str, Any] | None = None, **algo_kwargs: Any) -> TrainConfig:
        defaults = {
            "algo": algo,
            "env_id": "CartPole-v1",
            "total_timesteps": 256,
            "num_envs": 2,
            "eval_episodes": 2,
            "output_dir": tmp_path / "runs",
            "device": "cpu",
        }
        return TrainConfig(**{**defaults, **(config or {})}, algo_kwargs={**TINY[algo], **algo_kwargs})

    return make
