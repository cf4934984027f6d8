"""Packs that others wrote: what is refused before it is used, and what is not."""

from __future__ import annotations

import json
import re
import stat
import tracemalloc
import zipfile

import pytest

from pack_files import EVALUATED, entries, run_of, sealed, zipped
from rl_training import CheckpointError, evaluate_checkpoint, load_policy, pack_policy
from rl_training.runtime import packs
from test_cli import cli


@pytest.fixture
def pack(tiny_config, tmp_path):
    return pack_policy(run_of(tiny_config, "ppo", EVALUATED), tmp_path / "policy.zip").path


def test_a_pack_that_was_zipped_again_with_a_licence_is_read(pack, tmp_path):
    folders = {"checkpoints/": b"", "checkpoints/step_64/": b""}
    more = {"LICENSE": b"MIT", "notes.md": b"ours"}
    again = zipped(tmp_path / "again.zip", folders | entries(pack) | more, zipfile.ZIP_DEFLATED)
    assert again.stat().st_size < pack.stat().st_size
    assert evaluate_checkpoint(again) == evaluate_checkpoint(pack)


def with_entry(name, content=b"x", **changes):
    """A change of a pack: one more entry."""

    def change(pack):
        with zipfile.ZipFile(pack, "a") as archive:
            info = zipfile.ZipInfo(name)
            for key, value in changes.items():
                setattr(info, key, value)
            archive.writestr(info, content)

    return change


def rewritten(edit, compression=zipfile.ZIP_STORED):
    """A change of a pack: its contents, by name, after `edit`."""

    def change(pack):
        contents = entries(pack)
        edit(contents)
        zipped(pack, contents, compression)

    return change


IN = "checkpoints/step_64/"


def flip(contents):
    data = contents[IN + "actor.safetensors"]
    contents[IN + "actor.safetensors"] = data[:-1] + bytes([data[-1] ^ 1])


def grow(contents):
    contents[IN + "actor.safetensors"] += b"\0"


def no_tensors(contents):
    contents[IN + "actor.safetensors"] = data = b"\xff" * 64
    contents[IN + "manifest.json"] = sealed(contents[IN + "manifest.json"], "actor.safetensors", data)


def no_json(contents):
    contents[IN + "state.json"] = data = b"[" * 100_000
    contents[IN + "manifest.json"] = sealed(contents[IN + "manifest.json"], "state.json", data)


def damaged(pack):
    """One byte of the weights, behind zipfile's back."""
    data, weights = bytearray(pack.read_bytes()), entries(pack)[IN + "actor.safetensors"]
    data[data.index(weights[-64:]) + 10] ^= 1
    pack.write_bytes(data)


def false_size(pack):
    """The table of the entries states fewer bytes than there are."""
    data, size = bytearray(pack.read_bytes()), len(entries(pack)[IN + "actor.safetensors"])
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"checkpoints/step_64/actor.safetensors"))
    assert int.from_bytes(data[place + 24 : place + 28], "little") == size
    data[place + 24 : place + 28] = (size - 4).to_bytes(4, "little")
    pack.write_bytes(data)


FOREIGN = {
    "a way out": (with_entry("../evil.txt"), r"entry '\.\./evil.txt', which does not belong"),
    "an absolute path": (with_entry("/etc/evil.txt"), "which does not belong"),
    "a way out below": (with_entry("checkpoints/step_64/../../../evil.json"), "which does not belong"),
    "code": (with_entry("run.py"), "which does not belong"),
    "a pickle": (with_entry(IN + "data.pkl"), "data.pkl does not belong to the checkpoint"),
    "a link": (with_entry(IN + "link.json", b"/etc/passwd", external_attr=(stat.S_IFLNK | 0o777) << 16), "is a link"),
    "a link beside": (with_entry("a.md", b"/etc/passwd", external_attr=(stat.S_IFLNK | 0o777) << 16), "is a link"),
    "many entries": (rewritten(lambda found: found.update({f"{i}.md": b"" for i in range(100)})), "109 entries"),
    "two checkpoints": (with_entry("checkpoints/step_7/manifest.json", b"{}"), "one checkpoint: this holds 2"),
    "no checkpoint": (rewritten(lambda found: [found.pop(name) for name in list(found) if IN in name]), "holds 0"),
    "no manifest": (rewritten(lambda found: found.pop(IN + "manifest.json")), "manifest.json is missing"),
    "no weights": (rewritten(lambda found: found.pop(IN + "actor.safetensors")), "actor.safetensors is missing"),
    "other weights": (rewritten(flip), "actor.safetensors is damaged: its SHA-256 is not the one in manifest.json"),
    "more weights": (rewritten(grow), r"actor.safetensors has \d+ bytes instead of \d+"),
    "no tensors": (rewritten(no_tensors), "actor.safetensors is damaged"),
    "no json": (rewritten(no_json), "state.json is damaged: not JSON"),
    "a false size": (false_size, r"actor.safetensors has \d+ bytes instead of \d+"),
    "a damaged byte": (damaged, "actor.safetensors cannot be read: Bad CRC-32"),
    "unusual compression": (rewritten(lambda found: None, zipfile.ZIP_BZIP2), "compressed in an unusual way"),
    "a bomb": (rewritten(lambda found: found.update({"a.md": bytes(30_000_000)}), zipfile.ZIP_DEFLATED), "would grow"),
    "a bomb of weights": (
        rewritten(lambda found: found.update({IN + "actor.safetensors": bytes(30_000_000)}), zipfile.ZIP_DEFLATED),
        "would grow",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_refused(what, pack, tmp_path):
    change, message = FOREIGN[what]
    change(pack)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        load_policy(pack)
    assert sorted(tmp_path.rglob("*")) == before
    assert re.search(message.split(":")[0], cli("eval", pack, code=2))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_comes_twice_is_refused(pack):
    with_entry(IN + "state.json", b"{}")(pack)
    with pytest.raises(CheckpointError, match=r"has the entry '.*state.json' twice"):
        load_policy(pack)


def test_a_password_is_refused(pack):
    data = bytearray(pack.read_bytes())
    for place in (match.start() for match in re.finditer(b"PK\x01\x02", bytes(data))):
        data[place + 8] |= 1
    pack.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"README\.md is encrypted: write the pack without a password"):
        load_policy(pack)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 0.999])
def test_a_truncated_pack_says_so(share, pack):
    data = pack.read_bytes()
    pack.write_bytes(data[: int(share * len(data))])
    message = "truncated or damaged .*: copy or download it again" if share else "is a file, but no pack"
    with pytest.raises(CheckpointError, match=message):
        load_policy(pack)


def test_hardly_more_is_decompressed_than_an_entry_states(pack):
    """Its stream is longer than its size in the table, which passes all checks of sizes."""
    contents = entries(pack)
    zipped(pack, contents | {"a.md": bytes(12_000_000)}, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(pack) as archive:
        info = archive.getinfo("a.md")
        info.file_size = 10
        folder = packs.PackedFolder(pack, archive, {"a.md": info})
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=r"a.md cannot be read"):
            folder.read("a.md")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 4_000_000


def test_a_newer_format_says_so(pack):
    contents = entries(pack)
    body = json.loads(contents[IN + "manifest.json"]) | {"version": 99}
    zipped(pack, contents | {IN + "manifest.json": json.dumps(body).encode()})
    with pytest.raises(CheckpointError, match=r"has format version 99.*pip install --upgrade"):
        load_policy(pack)
