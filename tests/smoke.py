"""What every trained run has, whatever the algorithm: one helper for all smoke tests."""

from __future__ import annotations

import json
import math

from rl_training import TrainConfig, TrainResult

ALWAYS = {
    "global_step",
    "gradient_steps",
    "train_return_mean",
    "train_length_mean",
    "eval_return_mean",
    "eval_return_std",
    "eval_return_min",
    "steps_per_second",
}


def check_run(result: TrainResult, config: TrainConfig) -> None:
    assert result.metrics.keys() >= ALWAYS
    assert result.metrics["global_step"] >= config.total_timesteps
    assert result.metrics["gradient_steps"] > 0
    assert math.isfinite(result.metrics["eval_return_mean"])
    assert result.checkpoint_path == result.run_dir / "checkpoints" / f"step_{int(result.metrics['global_step'])}"
    for name in ("config.yaml", "metadata.json", "metrics.jsonl", "checkpoints/best"):
        assert (result.run_dir / name).exists(), name
    assert len(list(result.run_dir.glob("events.out.tfevents.*"))) == 1
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["global_step"] == result.metrics["global_step"]
    assert result.metrics.keys() <= {key for line in lines for key in line}
