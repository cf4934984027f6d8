"""Run folders as training writes them, with numbers that are chosen here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

SCHEDULE = {"kind": "linear", "start": 0.02, "end": 0.0}


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    scores: tuple[float, ...] = (10.0, 20.0),
    every: int = 100,
    start: int = 0,
    status: str = "finished",
    clock: float = 0.0,
    resumed: tuple[Path, int] | None = None,
    kwargs: dict[str, Any] | None = None,
    more: dict[str, float] | None = None,
    **config: Any,
) -> Path:
    """A run with an evaluation every so many steps after `start`, a log line at each and one halfway to it."""
    folder.mkdir(parents=True)
    algo_kwargs = {"clip_coef": 0.2, "ent_coef": SCHEDULE, **(kwargs or {})}
    settings = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 400, "seed": seed} | config
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "algo_kwargs": algo_kwargs}))
    git = {"commit": "0123456789abcdef", "dirty": False}
    metadata = {"seed": seed, "status": status, "git": git, "processor": "Abacus 9", "cpu_count": 2, "device": "cpu"}
    metadata["versions"] = {"torch": "2.13.0", "numpy": "2.4.6", "box2d": "1"}
    if resumed:
        origin, step = resumed
        metadata |= {"resumed_from": str(origin / "checkpoints" / f"step_{step}"), "resumed_at_step": step}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    rows = []
    for number, score in enumerate(scores, 1):
        end = start + number * every
        for step in (end - every // 2, end):
            head = {"time": 1e9 + clock + step, "wall_seconds": clock + step / 10, "global_step": step}
            coefficients = {"clip_coef": 0.2, "ent_coef": 0.02 * (1 - step / 400)}
            train = {"train_return_mean": score - 1, "steps_per_second": 50.0 + seed}
            rows.append({"kind": "train", **head, **train, **coefficients, **(more or {})})
        rows.append({"kind": "eval", **head, "eval_return_mean": score, "eval_return_std": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
