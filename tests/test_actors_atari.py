"""The Atari configs of asynchronous algorithms, in tiny runs: actors play on the vector emulator of ale-py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from rl_training import ALGORITHMS, load_config, train

pytest.importorskip("ale_py")
CONFIGS = [
    path.relative_to(REPOSITORY)
    for name, entry in sorted(ALGORITHMS.items())
    if entry.recipe.asynchronous
    for path in sorted((REPOSITORY / "configs" / name).glob("atari_*.yaml"))
]
TINY = {
    "total_timesteps": 64,
    "num_envs": 4,
    "execution.actors": 2,
    "algo_kwargs.num_steps": 8,
    "algo_kwargs.num_minibatches": 2,
    "eval_episodes": 1,
    "eval_env_kwargs.max_num_frames_per_episode": 60,
    "log_interval": 1,
    "device": "cpu",
    "num_threads": 1,
}


def test_both_algorithms_have_a_config_of_both_games() -> None:
    assert len(CONFIGS) == 4


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_trains(config: Path, tmp_path: Path, capfd: Any) -> None:
    overrides = [f"{key}={value}" for key, value in TINY.items()]
    result = train(load_config(REPOSITORY / config, overrides=overrides, output_dir=tmp_path), progress="silent")
    assert result.metrics["global_step"] == 64
    assert result.metrics["gradient_steps"] == (64 // 32) * 2 * result.metrics.get("update_epochs", 1)
    assert json.loads((result.run_dir / "metadata.json").read_text())["backend"] == "VectorEnvs"
    assert capfd.readouterr().err == ""  # of the actors as well
