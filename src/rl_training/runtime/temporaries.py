"""Directories that are written beside and renamed: their hidden names, and how to know one whose writer is dead."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


HIDDEN = re.compile(r"\..+\.\d+-[0-9a-f]+\.tmp")  # what `hidden_name` makes: other programs have temporaries too


def hidden_name(path: Path) -> Path:
    """A fresh hidden name beside `path`."""
    return path.parent / f".{path.name}.{os.getpid()}-{time.monotonic_ns():x}.tmp"


def make_temporary(path: Path) -> tuple[Path, int | None]:
    """(a new directory beside `path`, the lock on it: a descriptor to close once it is written and renamed)"""
    while True:
        temporary = hidden_name(path)
        temporary.mkdir()
        descriptor = lock(temporary, wait=True)
        if temporary.exists():  # else it was taken for abandoned before it was locked
            return temporary, descriptor
        if descriptor is not None:
            os.close(descriptor)


def lock(directory: Path, *, wait: bool = False) -> int | None:
    """Held while its writer lives, whatever ends it; None where another holds it, or there are no such locks here."""
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
    """Remove temporaries whose writer is dead."""
    for path in directory.glob(".*.tmp"):
        ours = HIDDEN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if ours and (descriptor := lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)
