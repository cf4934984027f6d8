"""The metrics of a run: their means, and their log in `metrics.jsonl`, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from rl_training.errors import MissingPackage
from rl_training.runtime.atomic_files import lock
from rl_training.runtime.event_files import open_events
from rl_training.runtime.log_file import LogFile
from rl_training.types import Metrics, Reports

FLUSH_SECONDS = 5.0
Kind = Literal["train", "eval"]  # of a line of the log
TIME_NAMES = ("time", "fps", "elapsed", "per_second", "seconds")


class TrainingDiverged(FloatingPointError):
    """A loss is no longer a finite number."""

    def __init__(self, step: int, name: str, value: float, *, remedy: str = "try a lower learning rate") -> None:
        super().__init__(f"training diverged at step {step:,}: {name} is {value}; {remedy}")
        self.step, self.name, self.value = step, name, value


def check_finite(metrics: Mapping[str, float], step: int) -> None:
    """Raise TrainingDiverged for a NaN or infinite metric."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingDiverged(step, name, float(value))


def over_tasks(each: Mapping[str, Metrics]) -> Metrics:
    """The means over all tasks and, if there are several, the metrics of each as `name/task`."""
    names = dict.fromkeys(name for metrics in each.values() for name in metrics)  # in order; not every task has all
    means = {name: fmean(metrics[name] for metrics in each.values() if name in metrics) for name in names}
    if len(each) == 1:
        return means
    return means | {of_task(name, task): value for task, metrics in each.items() for name, value in metrics.items()}


def of_task(name: str, task: str) -> str:
    return f"{name}/{task}"


def is_of_task(name: str) -> bool:
    """Whether a metric belongs to one task: no other metric has a slash in its name."""
    return "/" in name


class RunningMeans:
    """Means of the update metrics since the last log line, each over the updates that reported it.

    Of a metric whose name ends in `_max` it is the largest value instead.

    Tensors are read when a mean is needed or many are waiting, because reading one waits for the device.
    """

    MAX_WAITING = 1024  # tensors

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._waiting: list[tuple[str, Tensor]] = []

    def add(self, reports: Reports) -> Metrics:
        """Add reports, and return the values that became known, for a check."""
        known = {}
        for name, value in reports.items():
            if isinstance(value, list):
                self._waiting += [(name, tensor) for tensor in value]
            else:
                self._add(name, float(value))
                known[name] = float(value)
        return known | self.read() if len(self._waiting) > self.MAX_WAITING else known

    def _add(self, name: str, value: float) -> None:
        if name.endswith("_max"):
            self._sums[name], self._counts[name] = max(value, self._sums.get(name, value)), 1
            return
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> Metrics:
        """Read all waiting tensors at once, and return the sums."""
        if self._waiting:
            values = torch.stack([tensor for _, tensor in self._waiting]).tolist()
            for (name, _), value in zip(self._waiting, values, strict=True):
                self._add(name, value)
            self._waiting = []
        return dict(self._sums)

    def mean(self) -> Metrics:
        """The means since the last call."""
        means = {name: total / self._counts[name] for name, total in self.read().items()}
        self._sums, self._counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.read(), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["sums"].keys() != state["counts"].keys() or not all(count >= 1 for count in state["counts"].values()):
            raise ValueError("means: every sum needs a count of at least 1")
        self._sums, self._counts, self._waiting = dict(state["sums"]), dict(state["counts"]), []


def tensorboard_tag(name: str, schedule_names: Collection[str], hyperparameter_names: Collection[str] = ()) -> str:
    """The name of a metric, as in metrics.jsonl, after that of its group: schedule/ (a scalar that varies),
    hyperparameter/, eval/, loss/, time/ or train/."""
    return f"{_group(name, schedule_names, hyperparameter_names)}/{name}"


def _group(name: str, schedule_names: Collection[str], hyperparameter_names: Collection[str]) -> str:
    if name in schedule_names:
        return "schedule"
    if name in hyperparameter_names:
        return "hyperparameter"
    if name.startswith("eval_"):
        return "eval"
    if is_loss(name):
        return "loss"
    return "time" if name.startswith("time_") or name.endswith(TIME_NAMES) else "train"


def is_loss(name: str) -> bool:
    name = name.partition("/")[0]
    return name == "loss" or name.endswith("_loss") or name.startswith("loss_")


class MetricsLog:
    """Writes each record to all logs; files are flushed every few seconds.

    While it is open it holds the lock of the folder, which ends with the process: `is_abandoned` in reports/runs.py
    asks for it.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        schedule_names: Collection[str] = (),
        hyperparameter_names: Collection[str] = (),
        wandb: dict[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`schedule_names`: the hyperparameters that vary; `hyperparameter_names`: all scalars that are not off.
        `config`: that of the run, which TensorBoard shows as text and as its table of hyperparameters."""
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._schedule_names, self._hyperparameter_names = frozenset(schedule_names), frozenset(hyperparameter_names)
        self.path = run_dir / "metrics.jsonl"
        # Weights & Biases first: it may be missing, and nothing has been written yet.
        self._wandb = None
        if wandb is not None:
            self._wandb = import_wandb().init(**{"dir": str(run_dir), "name": run_dir.name, **wandb})
        if self.path.exists():
            raise FileExistsError(f"{self.path} belongs to an earlier run; resume that run or choose another folder")
        self._file = LogFile(self.path, "ab")
        self._events = open_events(run_dir)
        if config is not None:
            self._events.describe(run_dir.name, config)
        self._flushed = time.monotonic()
        self._lock = lock(run_dir, wait=True)

    def write(self, metrics: Mapping[str, float], *, kind: Kind = "train", wall_seconds: float | None = None) -> None:
        """Write one record, which must have `global_step`: of training or of an evaluation. `wall_seconds`: how long
        the run has taken so far, with the runs that it was resumed from."""
        step = int(metrics["global_step"])
        clean = {name: _plain(value) for name, value in metrics.items()}
        head: dict[str, Any] = {"kind": kind, "time": round(time.time(), 3)}
        if wall_seconds is not None:
            head["wall_seconds"] = round(wall_seconds, 3)
        self._file.write(json.dumps(head | clean, allow_nan=False).encode() + b"\n")
        tagged = {
            tensorboard_tag(name, self._schedule_names, self._hyperparameter_names): value
            for name, value in clean.items()
            if name != "global_step" and isinstance(value, int | float)
        }
        self._events.write(step, tagged)
        if self._wandb is not None:
            self._wandb.log(tagged, step=step)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.monotonic()
        self._file.flush()
        self._events.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.close()
        self._events.close()
        if self._lock is not None:
            os.close(self._lock)
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> float | int | str | None:
    """A JSON value: scalars of numpy and torch become Python's, and those that are not finite None."""
    if not isinstance(value, int | float | str | None):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingPackage('wandb logging needs wandb: pip install "rl-training[wandb]"') from error
    return wandb
