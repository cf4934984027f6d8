"""The metrics of a run: their means, and their log in `metrics.jsonl`, TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import MissingPackage
from rl_training.types import Metrics, Reports

FLUSH_SECONDS = 5.0
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
    """A metric with its group: schedule/ (a scalar that varies), hyperparameter/, eval/, loss/, time/ or train/."""
    if name in schedule_names:
        return f"schedule/{name}"
    if name in hyperparameter_names:
        return f"hyperparameter/{name}"
    for group in ("eval", "train", "time"):
        if name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    if is_loss(name):
        return f"loss/{name}"
    if name.endswith(TIME_NAMES):
        return f"time/{name}"
    return f"train/{name}"


def is_loss(name: str) -> bool:
    name = name.partition("/")[0]
    return name == "loss" or name.endswith("_loss") or name.startswith("loss_")


class LogFile:
    """A file to append to. A failed write is repeated by the next flush, with one warning: a log must not end a run."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self._file = open(path, mode, buffering=0)  # noqa: SIM115 - closed by close()
        self._waiting = bytearray()
        self._warned = False

    def write(self, data: bytes) -> int:
        self._waiting += data
        return len(data)

    def flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if not self._warned:
                self._warned = True
                cause = error.strerror or error
                warnings.warn(f"{self.path} cannot be written ({cause}); training continues", stacklevel=2)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(OSError):
            self._file.close()


class MetricsLog:
    """Writes each record to all logs; files are flushed every few seconds."""

    def __init__(
        self,
        run_dir: Path,
        *,
        schedule_names: Collection[str] = (),
        hyperparameter_names: Collection[str] = (),
        wandb: dict[str, Any] | None = None,
    ) -> None:
        """`schedule_names`: the hyperparameters that vary; `hyperparameter_names`: all scalars that are not off."""
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._schedule_names, self._hyperparameter_names = frozenset(schedule_names), frozenset(hyperparameter_names)
        self.path = run_dir / "metrics.jsonl"
        # Weights & Biases first: it may be missing, and nothing has been written yet.
        self._wandb = import_wandb().init(dir=str(run_dir), **wandb) if wandb is not None else None
        if self.path.exists():
            raise FileExistsError(f"{self.path} belongs to an earlier run; resume that run or choose another folder")
        self._file = LogFile(self.path, "ab")
        self._events = open_events(run_dir)
        self._flushed = time.monotonic()

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write one record, which must have `global_step`."""
        step = int(metrics["global_step"])
        clean = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(clean, allow_nan=False).encode() + b"\n")
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
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_events(directory: Path) -> EventFile | TorchEventFile:
    try:
        return EventFile(directory)
    except ImportError:
        return TorchEventFile(directory)


class TorchEventFile:
    """A TensorBoard event file by torch's public writer, which needs a thread and a slow import."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class EventFile:
    """A TensorBoard event file by TensorBoard's own RecordWriter; ImportError if this TensorBoard does not have it.

    EventFileWriter would need a thread and, if TensorFlow is installed, seconds of import.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node() or 'localhost'}.{os.getpid()}"
        self._file = LogFile(directory / name, "xb")
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=entries)))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
