"""The ways in which a run ends: with a result, by a signal, or by an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_training.types import Metrics


@dataclass(frozen=True)
class TrainResult:
    run_dir: Path
    checkpoint_path: Path
    metrics: Metrics
    schedules_end: int | None = None  # the step at which the schedules have ended; None: there are none


class TrainingFailed(RuntimeError):
    """Something outside the algorithm ended training; `checkpoint_path` is the last good checkpoint, or None."""

    def __init__(self, cause: str, *, step: int, run_dir: Path, checkpoint_path: Path | None) -> None:
        super().__init__(f"training failed at step {step:,}: {cause}; {last_good(checkpoint_path)}")
        self.run_dir, self.checkpoint_path = run_dir, checkpoint_path


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP: training stopped at a checkpoint, from which it can be resumed."""

    def __init__(self, result: TrainResult) -> None:
        super().__init__(f"interrupted at step {int(result.metrics['global_step']):,}; saved {result.checkpoint_path}")
        self.result = result


def last_good(path: Path | None) -> str:
    return f"the last good checkpoint is {path}" if path else "no checkpoint was saved"
