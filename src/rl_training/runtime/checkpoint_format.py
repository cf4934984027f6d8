"""The files of a checkpoint: their content, and the checks before it is used.

Nothing in a checkpoint can run code. `state.json` holds the nested state; in the place of each tensor or array it names
an entry of `<part>.safetensors`. `manifest.json` holds the size and SHA-256 of every file, and its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rl_training.errors import CheckpointError
from rl_training.runtime.metadata import package_version
from rl_training.runtime.state_files import decode, encode, safetensors_blocks
from rl_training.types import State

FORMAT = "rl-training checkpoint"
VERSION = 2  # 1 had actor and learner in one part
MANIFEST = "manifest.json"
TENSORS = ".safetensors"
REMEDY = "use another copy or an older checkpoint"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    info: dict[str, Any]
    config: dict[str, Any]
    state: dict[str, State]  # tensors on the CPU, each in memory of its own
    created: str = ""  # when it was written


def write_files(
    write: Callable[[str, Iterable[bytes | memoryview]], dict[str, Any]],
    state: dict[str, State],
    config: dict[str, Any],
    info: dict[str, Any],
    created: str,
) -> None:
    """The files of a checkpoint. `write` takes the name and the content of each, and returns its size and checksum."""
    files: dict[str, dict[str, Any]] = {}
    tree = {}
    for part, value in state.items():
        tensors: dict[str, Tensor | np.ndarray] = {}
        tree[part] = encode(value, (part,), tensors)
        if tensors:
            files[part + TENSORS] = write(part + TENSORS, safetensors_blocks(tensors))
    files["state.json"] = write("state.json", [json_bytes(tree)])
    files["config.json"] = write("config.json", [json_bytes(encode(config, ("config",), None))])
    body = {
        "format": FORMAT,
        "version": VERSION,
        "package_version": package_version() or "unknown",
        "created": created,
        "info": encode(info, ("info",), None),
        "files": files,
    }
    write(MANIFEST, [json_bytes({**body, "checksum": body_checksum(body)})])


def checked_manifest(data: bytes, present: set[str], directory: Path, parts: Collection[str] | None) -> dict[str, Any]:
    """The manifest, checked. `present`: the names of the files that there are."""
    file = directory / MANIFEST
    manifest = parse_object(data, file)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not of an {FORMAT}: its format is {manifest.get('format')!r}")
    version, unchanged = manifest.get("version"), manifest.pop("checksum", None) == body_checksum(manifest)
    newer, older = type(version) is int and version > VERSION, version == 1 and unchanged
    if newer or older:
        remedy = "pip install --upgrade rl-training" if newer else "use that version, or train again"
        raise CheckpointError(
            f"{directory} has format version {version}, written by rl-training {manifest.get('package_version')}; "
            f"this one ({package_version()}) reads {VERSION}: {remedy}"
        )
    if version != VERSION or not unchanged:
        raise CheckpointError(f"{file} was changed after it was written; {REMEDY}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not {"state.json", "config.json"} <= files.keys():
        raise CheckpointError(f"{file} does not list state.json and config.json")
    for name, entry in files.items():
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{file} lists {name!r}, which is not a plain file name")
        if not isinstance(entry, dict) or type(entry.get("size")) is not int or entry["size"] < 0:
            raise CheckpointError(f"{file} has no size for {name}")
    for name in sorted(name for name in files.keys() - present if needed(name, parts)):
        raise CheckpointError(f"{directory / name} is missing; {REMEDY}")
    for name in sorted(present - files.keys() - {MANIFEST}):
        raise CheckpointError(f"{directory / name} does not belong to the checkpoint; move it elsewhere")
    return manifest


def assemble(
    manifest: dict[str, Any],
    contents: dict[str, dict[str, Any]],
    directory: Path,
    path: Path,
    parts: Collection[str] | None,
) -> Checkpoint:
    """The checkpoint from the contents of its files, by name."""
    state = {}
    for part, value in contents["state.json"].items():
        if parts is None or part in parts:
            with decoding(directory / "state.json", part):
                state[part] = decode(value, contents.get(part + TENSORS, {}))
    with decoding(directory / "config.json"):
        config = require_dict(decode(contents["config.json"], {}))
    with decoding(directory / MANIFEST, "info"):
        info = require_dict(decode(manifest["info"], {}))
        step = info["global_step"]
        if type(step) is not int or not 0 <= step < 2**63:
            raise ValueError(f"global_step should be a step, got {step!r}")
    return Checkpoint(path, step, info, config, state, str(manifest.get("created", "")))


@contextlib.contextmanager
def decoding(file: Path, entry: str = "content") -> Iterator[None]:
    """Turn errors into CheckpointErrors: a file with the right checksum may still have invalid content."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{file} is not valid: {entry}: {type(error).__name__}: {error}") from error


def require_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"should be a mapping, got {value!r}")
    return value


def check_digest(digest: str, file: Path, entry: dict[str, Any]) -> None:
    if digest != entry.get("sha256"):
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}; {REMEDY}")


def needed(name: str, parts: Collection[str] | None) -> bool:
    return parts is None or not name.endswith(TENSORS) or name.removesuffix(TENSORS) in parts


def parse_object(data: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: not JSON ({error}); {REMEDY}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is damaged: it holds a {type(value).__name__}; {REMEDY}")
    return value


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def body_checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
