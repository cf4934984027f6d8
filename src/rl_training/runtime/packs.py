"""Packs: zip files with one checkpoint of a policy, and pages that describe it.

Reading one runs no code and writes no file. Only the checkpoint is read, `checkpoints/step_<number>/`; beside it there
may be texts and pictures, such as README.md and a licence.
"""

from __future__ import annotations

import hashlib
import re
import stat
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load
from torch import Tensor

from rl_training.errors import CheckpointError, shown
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
)

TIME = (1980, 1, 1, 0, 0, 0)  # of every entry: the same policy gives the same bytes
MODE = stat.S_IFREG | 0o644
BLOCK = 1 << 20  # bytes decompressed at a time
MOST_ENTRIES = 100
MOST_GROWTH, SPARE = 20, 1 << 24  # the content may have so many times the bytes of the file, and a few more
STEP_FOLDER = re.compile(r"(checkpoints/step_\d{1,19})/([A-Za-z0-9_][A-Za-z0-9_.-]*)")
PAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .-]*\.(?:md|txt|png|json|yaml)|LICEN[CS]E")
FOLDER = re.compile(r"checkpoints/(?:step_\d{1,19}/)?")  # an entry that some programs add


def add_entry(archive: zipfile.ZipFile, name: str, blocks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write an entry; gives its size and checksum.

    Nothing is compressed: weights hardly shrink, and another zlib would give other bytes.
    """
    views, digest = [memoryview(block) for block in blocks], hashlib.sha256()
    entry = zipfile.ZipInfo(name, TIME)
    entry.create_system, entry.external_attr = 3, MODE << 16  # as on Unix, wherever it is written
    entry.file_size = sum(view.nbytes for view in views)
    with archive.open(entry, "w") as target:
        for view in views:
            digest.update(view)
            target.write(view)
    return {"size": entry.file_size, "sha256": digest.hexdigest()}


class PackedFolder(NamedTuple):
    """The folder of the checkpoint in an open pack."""

    path: Path  # policy.zip/checkpoints/step_1000
    archive: zipfile.ZipFile
    entries: dict[str, zipfile.ZipInfo]  # by name in the folder

    def read(self, name: str) -> bytes:
        """The content of a file; never more bytes than its entry states."""
        try:
            with self.archive.open(self.entries[name]) as file:
                return b"".join(iter(lambda: file.read(BLOCK), b""))
        except Exception as error:  # of many types: an entry that is damaged, or has a false size
            raise CheckpointError(f"{self.path / name} cannot be read: {error}; use another copy") from error


def load_pack(path: Path, parts: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint in a pack, after the checks of one in a directory."""
    try:
        with zipfile.ZipFile(path) as archive:
            return load_folder(checked_folder(path, archive), parts)
    except CheckpointError:
        raise
    except Exception as error:  # of many types
        raise CheckpointError(not_a_pack(path, error)) from error


def not_a_pack(path: Path, error: Exception) -> str:
    try:
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
    except OSError as cause:
        return f"{path} cannot be read: {cause.strerror or cause}"
    if is_zip:
        return f"{path} is truncated or damaged ({error}): copy or download it again"
    return f"{path} is a file, but no pack: give a pack, a run folder or the checkpoint's directory"


def load_folder(folder: PackedFolder, parts: Collection[str] | None) -> Checkpoint:
    if MANIFEST not in folder.entries:
        raise CheckpointError(f"{folder.path / MANIFEST} is missing; use another copy")
    manifest = checked_manifest(folder.read(MANIFEST), set(folder.entries), folder.path, parts)
    contents: dict[str, dict[str, Any]] = {}
    for name, entry in manifest["files"].items():
        file = folder.path / name
        if name in folder.entries and folder.entries[name].file_size != entry["size"]:
            found = folder.entries[name].file_size
            raise CheckpointError(f"{file} has {found} bytes instead of {entry['size']}; {REMEDY}")
        if needed(name, parts):
            data = folder.read(name)
            check_digest(hashlib.sha256(data).hexdigest(), file, entry)
            contents[name] = parse_tensors(data, file) if name.endswith(TENSORS) else parse_object(data, file)
    return assemble(manifest, contents, folder.path, folder.path, parts)


def checked_folder(path: Path, archive: zipfile.ZipFile) -> PackedFolder:
    """The folder of the checkpoint. A CheckpointError where the file holds what a pack does not."""
    infos = archive.infolist()
    if len(infos) > MOST_ENTRIES:
        raise CheckpointError(f"{path} has {len(infos):,} entries, a pack at most {MOST_ENTRIES}: it is not read")
    total, size = sum(info.file_size for info in infos), path.stat().st_size
    if total > MOST_GROWTH * size + SPARE:
        raise CheckpointError(f"{path} has {size:,} bytes and would grow to {total:,}: it is not read")
    found: dict[str, dict[str, zipfile.ZipInfo]] = {}
    seen: set[str] = set()
    for info in infos:
        if info.filename in seen:
            raise CheckpointError(f"{path} has the entry {shown(info.filename)} twice: it is not read")
        seen.add(info.filename)
        check_entry(path, info)
        if match := STEP_FOLDER.fullmatch(info.filename):
            found.setdefault(match[1], {})[match[2]] = info
    if len(found) != 1:
        raise CheckpointError(
            f"{path} is a zip file, but no pack, which holds one checkpoint: this holds {len(found)}; "
            "`rl-training pack` makes one"
        )
    ((name, entries),) = found.items()
    return PackedFolder(path / name, archive, entries)


def check_entry(path: Path, info: zipfile.ZipInfo) -> None:
    name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
    if FOLDER.fullmatch(name) and info.file_size == 0:
        return
    if not (STEP_FOLDER.fullmatch(name) or PAGE.fullmatch(name)):
        raise CheckpointError(f"{path} has an entry {shown(name)}, which does not belong to a pack: it is not read")
    if kind not in (0, stat.S_IFREG):
        raise CheckpointError(f"{path}: {name} is a link or a special file, which does not belong to a pack")
    if info.flag_bits & 0x1:
        raise CheckpointError(f"{path}: {name} is encrypted: write the pack without a password")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CheckpointError(f"{path}: {name} is compressed in an unusual way: write it stored or deflated")


def parse_tensors(data: bytes, file: Path) -> dict[str, Tensor]:
    try:
        return load(data)
    except Exception as error:  # of many types
        raise CheckpointError(f"{file} is damaged: {error}; {REMEDY}") from error
