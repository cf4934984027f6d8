"""Reinforcement learning from one YAML file: every number that shapes training can be scheduled."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.errors import CheckpointError, ConfigError, InputError
    from rl_training.reports.pack import pack_policy
    from rl_training.runtime.controls import (
        resolve_clip_coefficient,
        resolve_entropy_coefficient,
        resolve_num_simulations,
        resolve_temperature,
    )
    from rl_training.runtime.demos import record_demonstrations
    from rl_training.runtime.dreaming import dream_checkpoint
    from rl_training.runtime.exporting import export_policy
    from rl_training.runtime.loading import load_config
    from rl_training.runtime.metadata import latest_run
    from rl_training.runtime.outcome import TrainingFailed, TrainingInterrupted, TrainResult
    from rl_training.runtime.policy import Policy
    from rl_training.runtime.recording import record_video
    from rl_training.runtime.workflows import (
        ALGORITHMS,
        evaluate_checkpoint,
        load_policy,
        predict_checkpoint,
        resume_training,
        train,
    )
    from rl_training.studies.bench import BenchResult, bench
    from rl_training.studies.tune import TuneResult, tune

_HOMES = {
    "BenchResult": "studies.bench",
    "bench": "studies.bench",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "InputError": "errors",
    "TrainConfig": "config",
    "resolve_clip_coefficient": "runtime.controls",
    "resolve_entropy_coefficient": "runtime.controls",
    "resolve_num_simulations": "runtime.controls",
    "resolve_temperature": "runtime.controls",
    "dream_checkpoint": "runtime.dreaming",
    "export_policy": "runtime.exporting",
    "record_demonstrations": "runtime.demos",
    "load_config": "runtime.loading",
    "latest_run": "runtime.metadata",
    "pack_policy": "reports.pack",
    "Policy": "runtime.policy",
    "record_video": "runtime.recording",
    "TrainResult": "runtime.outcome",
    "TrainingFailed": "runtime.outcome",
    "TrainingInterrupted": "runtime.outcome",
    "ALGORITHMS": "runtime.workflows",
    "evaluate_checkpoint": "runtime.workflows",
    "load_policy": "runtime.workflows",
    "predict_checkpoint": "runtime.workflows",
    "resume_training": "runtime.workflows",
    "train": "runtime.workflows",
    "TuneResult": "studies.tune",
    "tune": "studies.tune",
}
__all__ = [
    "ALGORITHMS",
    "BenchResult",
    "CheckpointError",
    "ConfigError",
    "InputError",
    "Policy",
    "TrainConfig",
    "TrainResult",
    "TrainingFailed",
    "TrainingInterrupted",
    "TuneResult",
    "bench",
    "dream_checkpoint",
    "evaluate_checkpoint",
    "export_policy",
    "latest_run",
    "load_config",
    "load_policy",
    "pack_policy",
    "predict_checkpoint",
    "record_demonstrations",
    "record_video",
    "resolve_clip_coefficient",
    "resolve_entropy_coefficient",
    "resolve_num_simulations",
    "resolve_temperature",
    "resume_training",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import on first use: torch costs seconds, and `rl-training --help` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
