"""Checkpoints: directories of safetensors and JSON, renamed when they are complete and checked before they are used."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import load_file
from torch import Tensor

from rl_training.errors import CheckpointError
from rl_training.runtime.atomic_files import hidden_name, make_temporary, remove_abandoned, sync_directory
from rl_training.runtime.checkpoint_format import (
    MANIFEST,
    REMEDY,
    TENSORS,
    Checkpoint,
    assemble,
    check_digest,
    checked_manifest,
    needed,
    parse_object,
    write_files,
)
from rl_training.runtime.packs import load_pack
from rl_training.types import State

CHUNK = 1 << 22  # bytes hashed and written at a time: large enough for the disk, small enough for the cache
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
STEP_NAME = re.compile(r"step_(\d+)")


def save_checkpoint(path: Path | str, *, state: dict[str, State], config: dict[str, Any], info: dict[str, Any]) -> Path:
    """Write a checkpoint, complete or not at all; `info` must have `global_step`."""
    path = Path(path)
    if type(info.get("global_step")) is not int or info["global_step"] < 0:
        raise ValueError(f"info['global_step'] must be a step count, got {info.get('global_step')!r}")
    for part in state:
        if not PART_NAME.fullmatch(part):
            raise ValueError(f"part {part!r} cannot be a file name; use letters, digits, '_' and '-'")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    temporary, lock = make_temporary(path)
    try:
        _write_content(temporary, state, config, info)
        sync_directory(temporary)
        _put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a success it no longer exists
        if lock is not None:
            os.close(lock)
    return path


def load_checkpoint(path: Path | str, parts: Collection[str] | None = None) -> Checkpoint:
    """Read the checkpoint `path`, after a check of every size and checksum.

    With `parts`, only those are read. The files of the others may be missing; if present, their size is checked.
    """
    path = Path(path)
    for _ in range(3):
        directory = _existing(path)
        before = os.stat(directory).st_ino if directory.exists() else None
        try:
            return _load(directory, path, parts)
        except CheckpointError:
            present = _existing(path)
            # If its run has replaced `best` meanwhile, files of two checkpoints were read: try again.
            if not present.exists() or os.stat(present).st_ino == before:
                raise
    raise CheckpointError(f"{path} is being replaced faster than it can be read; copy it first")


def open_checkpoint(path: Path | str, parts: Collection[str] | None = None) -> Checkpoint:
    """Read `path`: a checkpoint, the newest sound one of a run folder or `checkpoints` directory, or that of a pack.

    For `parts` see `load_checkpoint`.
    """
    path = Path(path)
    if path.is_file():
        return load_pack(path, parts)
    if not _existing(path).is_dir():
        raise CheckpointError(f"{path} {'is neither a folder nor a file' if path.exists() else 'does not exist'}")
    if (_existing(path) / MANIFEST).exists():
        return load_checkpoint(path, parts)
    for _ in range(100):
        damaged = []
        for candidate in _newest_first(path):
            try:
                checkpoint = load_checkpoint(candidate, parts)
            except (CheckpointError, OSError) as error:
                if not _existing(candidate).exists():
                    break  # its run has removed it meanwhile, and has a newer one
                damaged.append(str(error))
                continue
            for message in damaged:
                warnings.warn(f"passed over a damaged checkpoint, using {candidate.name}: {message}", stacklevel=2)
            return checkpoint
        else:
            raise CheckpointError(f"every checkpoint in {candidate.parent} is damaged: " + "; ".join(damaged))
    raise CheckpointError(f"{path}: its checkpoints are removed faster than they can be read; raise keep_checkpoints")


def best_of(path: Path | str) -> Path:
    """The checkpoint with the best evaluation, of a run folder or of the run that a checkpoint belongs to."""
    path = Path(path)
    if path.is_file():
        raise CheckpointError(f"{path} is a file with one checkpoint, the best or another: leave out --best")
    for folder in (path / "checkpoints", path, path.parent):
        if (_existing(folder / "best") / MANIFEST).exists():
            return folder / "best"
    raise CheckpointError(f"{path} has no checkpoint `best`: its run was not evaluated; train it with eval_interval")


def _newest_first(path: Path) -> list[Path]:
    """The checkpoints of a run folder or `checkpoints` directory; at least one."""
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found: list[Path] = []
    for _ in range(10):  # a listing may miss both the checkpoint that a run just removed and the one that followed
        found = found or [directory / step_dir_name(step) for step in reversed(_saved_steps(directory))]
    if not found and (_existing(directory / "best") / MANIFEST).exists():
        return [directory / "best"]  # the run was killed before its first other checkpoint
    if not found and (STEP_NAME.fullmatch(path.name) or path.name == "best"):
        raise CheckpointError(f"{path} has no {MANIFEST}: it is damaged or not a checkpoint; use another one")
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: neither {MANIFEST} nor checkpoints/step_*")
    return found


def prune_checkpoints(directory: Path, keep: int) -> None:
    """Remove all but the `keep` newest step_* (0: keep all); `best` and everything else stay."""
    if keep < 0:
        raise ValueError(f"keep must be 0 (keep all) or more, got {keep}")
    if keep == 0 or not directory.is_dir():
        return
    for step in _saved_steps(directory)[:-keep]:
        path = directory / step_dir_name(step)
        for old in (path, _previous(path)):
            if old.exists():
                _discard(old)


def step_dir_name(step: int) -> str:
    return f"step_{step}"


def _saved_steps(directory: Path) -> list[int]:
    """Step numbers of the step_* directories in order, with one whose replacement was interrupted."""
    if not directory.is_dir():
        return []
    names = [n.removeprefix(".").removesuffix(".previous") for n in os.listdir(directory) if not n.endswith(".tmp")]
    found = {int(m[1]) for m in map(STEP_NAME.fullmatch, names) if m and m[0] == step_dir_name(int(m[1]))}
    return sorted(step for step in found if _existing(directory / step_dir_name(step)).is_dir())


def _write_content(directory: Path, state: dict[str, State], config: dict[str, Any], info: dict[str, Any]) -> None:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_files(lambda name, blocks: _write_file(directory / name, blocks), state, config, info, created)


def _load(directory: Path, path: Path, parts: Collection[str] | None) -> Checkpoint:
    manifest = _read_manifest(directory, parts)
    contents: dict[str, dict[str, Any]] = {}
    for name, entry in manifest["files"].items():
        file = directory / name
        if not needed(name, parts):
            _check_size(file, entry)
        else:
            contents[name] = _read_safetensors(file, entry) if name.endswith(TENSORS) else _read_json(file, entry)
    return assemble(manifest, contents, directory, path, parts)


def _read_safetensors(file: Path, entry: dict[str, Any]) -> dict[str, Tensor]:
    digest = hashlib.sha256()
    with _open_checked(file, entry) as source:
        while block := source.read(CHUNK):
            digest.update(block)
    check_digest(digest.hexdigest(), file, entry)
    try:
        return load_file(file)
    except Exception as error:  # of many types, also if the file has been removed meanwhile
        raise CheckpointError(f"{file} is damaged: {error}; {REMEDY}") from error


def _read_json(file: Path, entry: dict[str, Any]) -> dict[str, Any]:
    with _open_checked(file, entry) as source:
        data = source.read()
    check_digest(hashlib.sha256(data).hexdigest(), file, entry)
    return parse_object(data, file)


def _check_size(file: Path, entry: dict[str, Any]) -> None:
    """Compare the size of a file, if it exists, without opening it."""
    with contextlib.suppress(FileNotFoundError):
        _compare_size(os.lstat(file), file, entry)


def _compare_size(found: os.stat_result, file: Path, entry: dict[str, Any]) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry["size"]:
        raise CheckpointError(f"{file} has {found.st_size} bytes instead of {entry['size']}; {REMEDY}")


def _read_manifest(directory: Path, parts: Collection[str] | None = None) -> dict[str, Any]:
    """The manifest, checked: it is one of ours and lists exactly the files in the directory."""
    file = directory / MANIFEST
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a checkpoint: no such directory")
    if not file.is_file() or file.is_symlink():
        raise CheckpointError(f"{directory} is not a checkpoint: no {MANIFEST} (damaged, or made by another program)")
    try:
        data, present = file.read_bytes(), set(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    return checked_manifest(data, present, directory, parts)


def _open_checked(file: Path, entry: dict[str, Any]) -> BinaryIO:
    try:
        # Do not follow symlinks; do not block if the file is a pipe.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        source = os.fdopen(os.open(file, flags), "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read (links are not followed): {error.strerror}") from error
    try:
        _compare_size(os.fstat(source.fileno()), file, entry)
    except CheckpointError:
        source.close()
        raise
    return source  # type: ignore[return-value]


def _write_file(file: Path, blocks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with open(file, "xb", buffering=0) as target:
        for block in blocks:
            view = memoryview(block)
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                digest.update(chunk)
                while chunk:  # an unbuffered write may be partial
                    chunk = chunk[target.write(chunk) :]
            size += len(view)
        os.fsync(target.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _previous(path: Path) -> Path:
    return path.parent / f".{path.name}.previous"


def _existing(path: Path) -> Path:
    """`path`, or its previous checkpoint if the writer died between the two renames of `_put_in_place`."""
    return _previous(path) if not path.exists() and _previous(path).is_dir() else path


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename the old directory first, because none can be renamed onto it; `_existing` finds it meanwhile."""
    aside = _previous(path)
    if path.exists():
        if aside.exists():
            _discard(aside)
        path.rename(aside)
    temporary.rename(path)
    sync_directory(path.parent)
    if aside.exists():
        _discard(aside)


def _discard(path: Path) -> None:
    """Remove a directory under a hidden name, so that none with a checkpoint's name is half removed."""
    hidden = hidden_name(path)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
