"""Runs with actors in other processes, and what such a run must not leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import envs_for_actors  # noqa: F401  (registers the environments)
from rl_training.runtime.run import TrainingRun
from test_env_workers import alive, descendants, wait_until

TRAINING_ONLY = {"fault": "", "folder": ""}


def process(**execution: Any) -> dict[str, Any]:
    """Two environments of one actor in another process. Each update has a log line."""
    return {"execution": {"backend": "process", "actors": 1, **execution}, "log_interval": 1}


def mischief(fault: str, folder: Path, **kwargs: Any) -> dict[str, Any]:
    """Environments that make trouble in training alone."""
    return {
        "env_id": "MischiefForTests-v0",
        "env_kwargs": {"fault": fault, "folder": str(folder), **kwargs},
        "eval_env_kwargs": TRAINING_ONLY,
    }


def abandoned_files() -> set[str]:
    """The files of shared memory that are ours and that no process uses: those of other runs beside are in use."""
    folder, ours = Path("/dev/shm"), set[str]()
    for file in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # it is gone already
            if file.stat().st_uid == os.getuid():
                ours.add(str(file))
    used = set[str]()
    for process in Path("/proc").glob("[0-9]*") if ours else ():
        with contextlib.suppress(OSError):
            used.update(line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines())
            used.update(os.readlink(descriptor) for descriptor in (process / "fd").iterdir())
    return ours - used


def memory_files() -> int:
    """The files without a name that this process has open in memory."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("memfd:rl_training" in target for target in targets)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No process, descriptor or file of shared memory may be left of what is done inside."""
    processes, files, memory = descendants(os.getpid()), abandoned_files(), memory_files()
    yield
    assert descendants(os.getpid()) <= processes
    gc.collect()  # arrays in shared memory keep it open
    assert memory_files() <= memory
    assert wait_until(lambda: abandoned_files() <= files, 20)  # other tests have files there for a moment


def family(pid: int) -> set[int]:
    """A process's descendants of every generation."""
    children = descendants(pid)
    return children.union(*map(family, children))


def all_ended(pids: set[int]) -> bool:
    return wait_until(lambda: not any(map(alive, pids)), 30)


def messages(monkeypatch: Any) -> list[str]:
    """What a run tells the user."""
    found, init = [], TrainingRun.__init__

    def noting(run: Any, *args: Any, **options: Any) -> None:
        init(run, *args, **options)
        run.progress.message = found.append

    monkeypatch.setattr(TrainingRun, "__init__", noting)
    return found
