"""Checkpoints: directories of safetensors and JSON, renamed when they are complete and checked before they are used.

Nothing in a checkpoint can run code. `state.json` holds the nested state; in the place of each tensor or array it names
an entry of `<part>.safetensors`. `manifest.json` holds the size and SHA-256 of every file, and its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from rl_training.errors import InputError
from rl_training.runtime.atomic_files import hidden_name, make_temporary, remove_abandoned, sync_directory
from rl_training.runtime.metadata import package_version
from rl_training.runtime.state_files import decode, encode, safetensors_blocks
from rl_training.types import State

FORMAT = "rl-training checkpoint"
VERSION = 2  # 1 had actor and learner in one part
MANIFEST = "manifest.json"
TENSORS = ".safetensors"
CHUNK = 1 << 22  # bytes hashed and written at a time: large enough for the disk, small enough for the cache
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
STEP_NAME = re.compile(r"step_(\d+)")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, foreign or too new."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    info: dict[str, Any]
    config: dict[str, Any]
    state: dict[str, State]  # tensors on the CPU, each in memory of its own


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
    """Read `path`: a checkpoint, or the newest sound one of a run folder or `checkpoints` directory.

    For `parts` see `load_checkpoint`.
    """
    path = Path(path)
    if not _existing(path).is_dir():
        what = "is a file; give the checkpoint's directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}")
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
    files: dict[str, dict[str, Any]] = {}
    tree = {}
    for part, value in state.items():
        tensors: dict[str, Tensor | np.ndarray] = {}
        tree[part] = encode(value, (part,), tensors)
        if tensors:
            name = part + TENSORS
            files[name] = _write_file(directory / name, safetensors_blocks(tensors))
    files["state.json"] = _write_file(directory / "state.json", [_json_bytes(tree)])
    files["config.json"] = _write_file(directory / "config.json", [_json_bytes(encode(config, ("config",), None))])
    body = {
        "format": FORMAT,
        "version": VERSION,
        "package_version": package_version() or "unknown",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "info": encode(info, ("info",), None),
        "files": files,
    }
    _write_file(directory / MANIFEST, [_json_bytes({**body, "checksum": _body_checksum(body)})])


def _load(directory: Path, path: Path, parts: Collection[str] | None) -> Checkpoint:
    manifest = _read_manifest(directory, parts)
    contents: dict[str, dict[str, Any]] = {}
    for name, entry in manifest["files"].items():
        file = directory / name
        if not _needed(name, parts):
            _check_size(file, entry)
        else:
            contents[name] = _read_safetensors(file, entry) if name.endswith(TENSORS) else _read_json(file, entry)
    state = {}
    for part, value in contents["state.json"].items():
        if parts is None or part in parts:
            with _decoding(directory / "state.json", part):
                state[part] = decode(value, contents.get(part + TENSORS, {}))
    with _decoding(directory / "config.json"):
        config = _require_dict(decode(contents["config.json"], {}))
    with _decoding(directory / MANIFEST, "info"):
        info = _require_dict(decode(manifest["info"], {}))
        step = info["global_step"]
        if type(step) is not int or not 0 <= step < 2**63:
            raise ValueError(f"global_step should be a step, got {step!r}")
    return Checkpoint(path, step, info, config, state)


@contextlib.contextmanager
def _decoding(file: Path, entry: str = "content") -> Iterator[None]:
    """Turn errors into CheckpointErrors: a file with the right checksum may still have invalid content."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{file} is not valid: {entry}: {type(error).__name__}: {error}") from error


def _require_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"should be a mapping, got {value!r}")
    return value


def _read_safetensors(file: Path, entry: dict[str, Any]) -> dict[str, Tensor]:
    digest = hashlib.sha256()
    with _open_checked(file, entry) as source:
        while block := source.read(CHUNK):
            digest.update(block)
    _check_digest(digest.hexdigest(), file, entry)
    try:
        return load_file(file)
    except Exception as error:  # of many types, also if the file has been removed meanwhile
        raise CheckpointError(f"{file} is damaged: {error}; use an older checkpoint") from error


def _read_json(file: Path, entry: dict[str, Any]) -> dict[str, Any]:
    with _open_checked(file, entry) as source:
        data = source.read()
    _check_digest(hashlib.sha256(data).hexdigest(), file, entry)
    return _parse_object(data, file)


def _check_digest(digest: str, file: Path, entry: dict[str, Any]) -> None:
    if digest != entry.get("sha256"):
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}; use an older checkpoint")


def _needed(name: str, parts: Collection[str] | None) -> bool:
    return parts is None or not name.endswith(TENSORS) or name.removesuffix(TENSORS) in parts


def _check_size(file: Path, entry: dict[str, Any]) -> None:
    """Compare the size of a file, if it exists, without opening it."""
    with contextlib.suppress(FileNotFoundError):
        _compare_size(os.lstat(file), file, entry)


def _compare_size(found: os.stat_result, file: Path, entry: dict[str, Any]) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry["size"]:
        raise CheckpointError(f"{file} has {found.st_size} bytes instead of {entry['size']}; use an older checkpoint")


def _read_manifest(directory: Path, parts: Collection[str] | None = None) -> dict[str, Any]:
    """The manifest, checked: it is one of ours and lists exactly the files in the directory."""
    file = directory / MANIFEST
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a checkpoint: no such directory")
    if not file.is_file() or file.is_symlink():
        raise CheckpointError(f"{directory} is not a checkpoint: no {MANIFEST} (damaged, or made by another program)")
    try:
        manifest = _parse_object(file.read_bytes(), file)
        present = set(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not of an {FORMAT}: its format is {manifest.get('format')!r}")
    version, unchanged = manifest.get("version"), manifest.pop("checksum", None) == _body_checksum(manifest)
    newer, older = type(version) is int and version > VERSION, version == 1 and unchanged
    if newer or older:
        remedy = "pip install --upgrade rl-training" if newer else "use that version, or train again"
        raise CheckpointError(
            f"{directory} has format version {version}, written by rl-training {manifest.get('package_version')}; "
            f"this one ({package_version()}) reads {VERSION}: {remedy}"
        )
    if version != VERSION or not unchanged:
        raise CheckpointError(f"{file} was changed after it was written; use an older checkpoint")
    files = manifest.get("files")
    if not isinstance(files, dict) or not {"state.json", "config.json"} <= files.keys():
        raise CheckpointError(f"{file} does not list state.json and config.json")
    for name, entry in files.items():
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{file} lists {name!r}, which is not a plain file name")
        if not isinstance(entry, dict) or type(entry.get("size")) is not int or entry["size"] < 0:
            raise CheckpointError(f"{file} has no size for {name}")
    for name in sorted(name for name in files.keys() - present if _needed(name, parts)):
        raise CheckpointError(f"{directory / name} is missing; use an older checkpoint")
    for name in sorted(present - files.keys() - {MANIFEST}):
        raise CheckpointError(f"{directory / name} does not belong to the checkpoint; move it elsewhere")
    return manifest


def _parse_object(data: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: not JSON ({error}); use an older checkpoint") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is damaged: it holds a {type(value).__name__}; use an older checkpoint")
    return value


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


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _body_checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
