"""What run folders hold: config, metadata and curves; a run that was resumed is one, across its folders."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from rl_training.errors import InputError
from rl_training.runtime.atomic_files import lock
from rl_training.runtime.metadata import METADATA

CONFIG, LOG = "config.yaml", "metrics.jsonl"
ABANDONED = "failed: its process ended without a word: killed, out of memory, or the machine stopped"
HEAD = ("kind", "time", "wall_seconds", "global_step")  # of a line of the log; all others are metrics


class Curve(NamedTuple):
    """A metric of one run, where it is a number."""

    steps: np.ndarray
    seconds: np.ndarray  # of wall-clock time since the run began; NaN where the log does not tell
    values: np.ndarray


@dataclass(frozen=True)
class Run:
    """One training run. `folders`: of each time it was started or resumed, the first one first."""

    folders: list[Path]
    config: dict[str, Any]
    metadata: dict[str, Any]  # of the last folder
    lines: list[dict[str, Any]]  # of the log, in order

    @property
    def name(self) -> str:
        return self.folders[-1].name

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def status(self) -> str:
        """running, finished, `stopped: ...` or `failed: ...`."""
        return str(self.metadata.get("status", "unknown"))

    @property
    def step(self) -> int:
        return max((int(line["global_step"]) for line in self.lines), default=0)

    @property
    def wall_seconds(self) -> float | None:
        return next((line["wall_seconds"] for line in reversed(self.lines) if "wall_seconds" in line), None)

    def metrics(self, kind: str) -> list[str]:
        """The metrics of its log lines (`train`) or evaluations (`eval`), in the order of the log."""
        names = dict.fromkeys(name for line in self.lines if line["kind"] == kind for name in line)
        return [name for name in names if name not in HEAD]

    def curve(self, metric: str) -> Curve:
        kind = "eval" if metric.startswith("eval_") else "train"
        rows = [line for line in self.lines if line["kind"] == kind and is_number(line.get(metric))]
        columns = ("global_step", "wall_seconds", metric)
        return Curve(*(np.array([line.get(name, math.nan) for line in rows], np.float64) for name in columns))

    def score(self, metric: str) -> float | None:
        """The last value of a metric; None before its first."""
        values = self.curve(metric).values
        return float(values[-1]) if len(values) else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def load_run(folder: str | Path) -> Run:
    """The run that ended in this folder, with the folders that it was resumed from where they still exist."""
    folder = Path(folder)
    if not is_run(folder):
        raise InputError(f"{folder} is no run folder: it has no {CONFIG} and {LOG}")
    folders, lines = [folder], read_log(folder)
    metadata = read_metadata(folder)
    if is_abandoned(folder, metadata):
        metadata["status"] = ABANDONED
    origin, step = origin_of(folder, metadata)
    while origin is not None and origin not in folders:
        lines = [line for line in read_log(origin) if line["global_step"] <= step] + lines
        folders.insert(0, origin)
        origin, step = origin_of(origin, read_metadata(origin))
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG} should be a mapping of the config's keys")
    return Run(folders, config, metadata, without_repeats(lines))


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    """The runs in these folders, each of which is a run or holds runs. A run that was resumed from another of them
    stands for both."""
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in run_folders(Path(path))))
    runs = [load_run(folder) for folder in folders]
    origins = {folder.resolve() for run in runs for folder in run.folders[:-1]}
    return [run for run in runs if run.folders[-1].resolve() not in origins]


def run_folders(path: Path) -> list[Path]:
    """The path itself, or the run folders below it."""
    if is_run(path):
        return [path]
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}: give run folders, or a folder of them such as runs")
    found = sorted(log.parent for log in path.rglob(LOG) if is_run(log.parent))
    if not found:
        raise InputError(f"there is no run in {path}: no folder with {CONFIG} and {LOG}")
    return found


def is_run(path: Path) -> bool:
    return (path / LOG).is_file() and (path / CONFIG).is_file()


def is_abandoned(folder: Path, metadata: Mapping[str, Any]) -> bool:
    """Whether a run of this machine could not write how it ended: a running one holds the lock of its folder."""
    if metadata.get("status") != "running" or metadata.get("hostname") != platform.node():
        return False
    descriptor = lock(folder)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def origin_of(folder: Path, metadata: Mapping[str, Any]) -> tuple[Path | None, int]:
    """(the folder that a run was resumed from, the step), also where both were moved together."""
    checkpoint, step = metadata.get("resumed_from"), metadata.get("resumed_at_step")
    if not isinstance(checkpoint, str) or not isinstance(step, int):
        return None, 0
    origin = Path(checkpoint).parent.parent  # RUN/checkpoints/step_1000
    candidates = (folder.parent / origin.name, origin)
    return next((each for each in candidates if is_run(each) and each.resolve() != folder.resolve()), None), step


def read_metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log. The last may be written at this moment; a line of before lines had a `kind` gets one."""
    lines = []
    for text in (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and is_number(line.get("global_step")):
            lines.append({"kind": "eval" if "eval_return_mean" in line else "train", **line})
    return lines


def without_repeats(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line of each kind for a step: a resumed run repeats those that its origin wrote after the checkpoint."""
    return list({(line["kind"], line["global_step"]): line for line in lines}.values())
