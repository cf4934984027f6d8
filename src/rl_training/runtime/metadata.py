"""What a run was made with, in `metadata.json`, and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl_training.config import InputError

METADATA = "metadata.json"
PACKAGES = ("torch", "gymnasium", "numpy", "numba", "safetensors", "tensorboard", "ale-py", "mujoco", "envpool")


def write_metadata(
    run_dir: Path, *, command: str | Sequence[str], seed: int, extra: dict[str, Any] | None = None
) -> Path:
    """Everything needed to make the run again: versions, commit, command, seed, machine; `extra` adds the device."""
    metadata = {
        "command": command if isinstance(command, str) else shlex.join(command),
        "seed": seed,
        "status": "running",
        "started": now(),
        "versions": package_versions(),
        "git": git_state(Path.cwd()),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "hostname": platform.node(),
        **(extra or {}),
    }
    return write_json_atomic(Path(run_dir) / METADATA, metadata)


def update_metadata(run_dir: Path, **more: Any) -> Path:
    """Add to `metadata.json`, with the time; started anew if it is gone or damaged: bookkeeping never stops a run."""
    path = Path(run_dir) / METADATA
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        metadata = {}
    metadata = {**(metadata if isinstance(metadata, dict) else {}), "updated": now(), **more}
    try:
        return write_json_atomic(path, metadata)
    except OSError:  # a full disk, or a folder made read-only, may still let the file be overwritten
        return _overwrite(path, metadata)


def _overwrite(path: Path, value: Any) -> Path:
    with open(path, "r+", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.truncate()
    return path


def latest_run(output_dir: str | Path = "runs") -> Path:
    """The run in `output_dir` that was started last, of those that have a checkpoint."""
    folder = Path(output_dir)
    runs = [path.parents[1] for path in folder.glob("*/checkpoints/*") if path.is_dir() and path.name[0] != "."]
    if not runs:
        raise InputError(f"there is no run with a checkpoint in {folder}; give output_dir, or the run's own folder")
    return max(runs, key=_started)


def _started(run_dir: Path) -> tuple[str, int]:
    """When a run began: by its own word, to the second, and by its file, which a copy may not keep."""
    path = run_dir / METADATA
    try:
        metadata, changed = json.loads(path.read_text(encoding="utf-8")), (run_dir / "config.yaml").stat().st_mtime_ns
    except (OSError, ValueError):
        return "", 0
    return str(metadata.get("started", "") if isinstance(metadata, dict) else ""), changed


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


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and dirty flag of the work tree around `directory`; None outside one or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    # fsmonitor is a program that the repository names: reading its state must not run it. Nor take its lock.
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_text_atomic(path: Path, text: str) -> Path:
    """Readers see the old content or the new one, also after a crash."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return path


def write_json_atomic(path: Path, value: Any) -> Path:
    return write_text_atomic(path, json.dumps(value, indent=2) + "\n")


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` last."""
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
