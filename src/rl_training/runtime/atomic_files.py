"""Files and directories that are written under a hidden name and renamed when they are complete."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rl_training.errors import InputError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

HIDDEN = re.compile(r"\..+\.\d+-[0-9a-f]+\.tmp")  # made by `hidden_name`; other programs have temporary files too


def write_text_atomic(path: Path, text: str) -> Path:
    return write_atomic(path, lambda file: file.write(text.encode()))


def write_atomic(path: Path, write: Callable[[BinaryIO], Any]) -> Path:
    """Call `write` with a file. Readers see the old content or the new one, also after a crash."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return path


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A name with the same suffix, for programs that write to a path. Its file becomes `path` at the end."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` survive a crash of the system."""
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hidden_name(path: Path) -> Path:
    """A new hidden name beside `path`."""
    return path.parent / f".{path.name}.{os.getpid()}-{time.monotonic_ns():x}.tmp"


def make_temporary(path: Path) -> tuple[Path, int | None]:
    """(a new hidden directory beside `path`, its lock: a descriptor to close when the directory has been renamed)"""
    while True:
        temporary = hidden_name(path)
        temporary.mkdir()
        descriptor = lock(temporary, wait=True)
        if temporary.exists():  # else another process removed it as abandoned before it was locked
            return temporary, descriptor
        if descriptor is not None:
            os.close(descriptor)


def lock(directory: Path, *, wait: bool = False) -> int | None:
    """A lock that ends with the process; None if another holds it, or the system has no such locks."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_abandoned(directory: Path) -> None:
    """Remove hidden directories whose writer is dead."""
    for path in directory.glob(".*.tmp"):
        ours = HIDDEN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if ours and (descriptor := lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)
