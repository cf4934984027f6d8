"""Versions and machine, for `metadata.json` in a run's folder and for `rl-training doctor`."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_training.errors import InputError
from rl_training.runtime.atomic_files import write_text_atomic

METADATA = "metadata.json"
PACKAGES = ("torch", "gymnasium", "numpy", "numba", "safetensors", "tensorboard", "ale-py", "mujoco", "envpool", "ray")
EXTRAS = {
    "atari": "ale_py",
    "mujoco": "mujoco",
    "dm-control": "dm_control",
    "box2d": "Box2D",
    "onnx": "onnxruntime",
    "plot": "matplotlib",
    "video": "imageio_ffmpeg",
    "wandb": "wandb",
    "minari": "minari",
    "ray": "ray",
    "tune": "optuna",
}


def write_metadata(
    run_dir: Path, *, command: str | Sequence[str], seed: int, extra: dict[str, Any] | None = None
) -> Path:
    """Write the facts that reproduce the run: versions, commit, command, seed, machine, and `extra`."""
    metadata = {
        "command": command if isinstance(command, str) else shlex.join(command),
        "seed": seed,
        "status": "running",
        "started": now(),
        "versions": package_versions(),
        "git": git_state(Path.cwd()),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpu_count": os.cpu_count(),
        "hostname": platform.node(),
        **(extra or {}),
    }
    return write_json_atomic(Path(run_dir) / METADATA, metadata)


def update_metadata(run_dir: Path, **more: Any) -> Path:
    """Add entries and the time to `metadata.json`. A missing or damaged one is replaced: it must not end a run."""
    path = Path(run_dir) / METADATA
    metadata = {**_read_metadata(path), "updated": now(), **more}
    try:
        return write_json_atomic(path, metadata)
    except OSError:  # on a full disk or in a read-only folder, the existing file may still be writable
        with open(path, "r+", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(metadata, indent=2) + "\n")
            file.truncate()
        return path


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def latest_run(output_dir: str | Path = "runs") -> Path:
    """The run in `output_dir` that was started last, of those that have a checkpoint."""
    folder = Path(output_dir)
    runs = [path.parents[1] for path in folder.glob("*/checkpoints/*") if path.is_dir() and path.name[0] != "."]
    if not runs:
        raise InputError(f"there is no run with a checkpoint in {folder}; give output_dir, or the run's own folder")
    return max(runs, key=_started)


def _started(run_dir: Path) -> tuple[str, int]:
    """The start of a run by its metadata, to the second, then by its config file, whose time a copy may not keep."""
    try:
        changed = (run_dir / "config.yaml").stat().st_mtime_ns
    except OSError:
        changed = 0
    return str(_read_metadata(run_dir / METADATA).get("started", "")), changed


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def package_version(name: str = "rl-training") -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_versions() -> dict[str, str]:
    versions = {name: package_version(name) for name in PACKAGES}
    installed = {name: found for name, found in versions.items() if found is not None}
    return {"python": platform.python_version(), "rl_training": package_version() or "unknown", **installed}


def installation_report() -> dict[str, str]:
    """Versions, devices, threads, backends and the extras that are not installed, each in one line."""
    import torch  # here, because finding the latest run does not need it

    gpus = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    omp = os.environ.get("OMP_NUM_THREADS", "not set")
    optional = [name for name, module in (("ale", "ale_py"), ("envpool", "envpool")) if find_spec(module)]
    missing = [f"rl-training[{extra}]" for extra, module in EXTRAS.items() if find_spec(module) is None]
    return {
        **package_versions(),
        "devices": ", ".join(["cpu", *gpus]),
        "threads": f"torch {torch.get_num_threads()}, cores {os.cpu_count()}, OMP_NUM_THREADS {omp}",
        "backends": ", ".join(["sync", "async", "vector", *optional]),
        **({"not installed": ", ".join(missing)} if missing else {}),
    }


def processor_name() -> str:
    """The model of the processor, as Linux knows it; elsewhere what Python does."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and dirty flag of the work tree around `directory`; None outside one or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    # fsmonitor is a program that the repository's config names: reading the state must not run it, nor take a lock.
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_json_atomic(path: Path, value: Any) -> Path:
    return write_text_atomic(path, json.dumps(value, indent=2) + "\n")
