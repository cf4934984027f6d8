"""Checkpoints come back exactly, or are refused; a killed writer never costs the last good one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rl_training.errors import CheckpointError
from rl_training.runtime import atomic_files, checkpoint_format, checkpoints, state_files
from rl_training.runtime.checkpoints import (
    load_checkpoint,
    open_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    step_dir_name,
)

NUMPY_DTYPES = [dtype for _, dtype in state_files.DTYPES.values() if dtype]


def save(path: Path, state: dict[str, Any] | None = None, step: int = 7) -> Path:
    if state is None:
        state = {"actor": {"weight": torch.arange(6.0).reshape(2, 3)}, "run": {"best": 1.5, "seen": np.arange(4)}}
    return save_checkpoint(path, state=state, config={"algo": "ppo"}, info={"global_step": step})


def roundtrip(tmp_path: Path, value: Any) -> Any:
    return load_checkpoint(save(tmp_path / "c", {"part": {"value": value}})).state["part"]["value"]


def assert_same(left: Any, right: Any) -> None:
    """Equal in kind, dtype, shape and every bit; tuples may have become lists."""
    if isinstance(left, dict):
        assert type(right) is dict
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert type(right) is list
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert state_files._raw_bytes(left).tobytes() == state_files._raw_bytes(right).tobytes()
    elif isinstance(left, np.ndarray | np.generic):
        assert type(left) is type(right)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif type(left) is float:
        assert type(right) is float
        assert struct.pack("d", left) == struct.pack("d", right)
    else:
        assert type(left) is type(right)
        assert left == right


arrays = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
tensors = arrays.map(lambda array: torch.from_numpy(array.copy()))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), arrays, tensors, arrays.map(lambda a: a.sum())
)
keys = st.one_of(
    st.text(), st.integers(-9, 9), st.sampled_from(["a", "a.b", "b", "$tensor", "__metadata__", "/", ".."])
)
states = st.dictionaries(
    keys,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(state=st.dictionaries(st.sampled_from(["actor", "replay", "run-2", "state"]), states, max_size=3))
def test_nested_states_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    path = save(tmp_path_factory.mktemp("state") / "c", state)
    assert_same(state, load_checkpoint(path).state)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    kinds = {"array": array, "tensor": torch.from_numpy(array), "scalar": array[1, 1], "zero_d": np.array(array[1, 1])}
    assert_same(kinds, roundtrip(tmp_path, kinds))


def test_tensors_that_are_not_plain_blocks_of_memory(tmp_path: Path) -> None:
    base = torch.arange(24.0, dtype=torch.bfloat16).reshape(4, 6)
    state = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "row": base[1],
        "shared": base,
        "expanded": torch.ones(1, 3).expand(2, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "reversed": np.arange(5)[::-1],
        "empty": np.zeros((0, 3), np.float32),
        "zero_d": torch.tensor(3),
        "empty_of_numpy": torch.from_numpy(np.zeros(0, np.float32)),  # its stride is 0
    }
    loaded = roundtrip(tmp_path, state)
    assert_same(state, loaded)
    loaded["shared"].zero_()
    assert loaded["row"].sum() != 0, "loaded tensors must not share memory"
    assert loaded["reversed"].flags.writeable


def test_generators_and_an_optimizer_go_on_exactly(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rng = np.random.default_rng(1)
    loaded = roundtrip(tmp_path, {"optimizer": optimizer.state_dict(), "rng": rng.bit_generator.state})
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(loaded["optimizer"])
    assert_same(optimizer.state_dict(), other.state_dict())
    again = np.random.default_rng(2)
    again.bit_generator.state = loaded["rng"]
    assert again.random() == rng.random()


def test_keys_whose_joined_names_collide(tmp_path: Path) -> None:
    state = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2), "b'": np.ones(1)}, "__metadata__": torch.ones(1)}
    assert_same(state, load_checkpoint(save(tmp_path / "c", {"part": state})).state["part"])


def test_integers_of_any_size(tmp_path: Path) -> None:
    values = [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**128, -(7**9000)]
    assert roundtrip(tmp_path, values) == values


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", 1j, np.array(["text"]), np.array([None]), torch.ones(2).to_sparse(), Path("x")],
)
def test_what_cannot_be_saved_is_named_with_its_path(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"actor\.models\.1\.odd"):
        save(tmp_path / "c", {"actor": {"models": [0, {"odd": value}]}})
    assert os.listdir(tmp_path) == [], "a save that failed leaves nothing"


def test_a_key_that_is_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"run\.table: key 1.5 is a float"):
        save(tmp_path / "c", {"run": {"table": {1.5: 0}}})


@pytest.mark.parametrize("part", ["", "../run", "a/b", ".hidden", "a b"])
def test_part_names_are_file_names(tmp_path: Path, part: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        save(tmp_path / "c", {part: {}})


def test_info_and_config_come_back(tmp_path: Path) -> None:
    info = {"global_step": 3, "metrics": {"loss": np.float64(0.5), "bad": float("inf")}}
    path = save_checkpoint(tmp_path / "c", state={}, config={"lr": [1e-3, None, "x"]}, info=info)
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.info, loaded.config, loaded.state) == (3, info, {"lr": [1e-3, None, "x"]}, {})


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    arrays = {"a": {"b": np.arange(3, dtype=np.uint8)}, "c": np.eye(2), "d": np.array(True)}
    path = save(tmp_path / "c", {"part": arrays})
    read = safetensors.numpy.load_file(path / "part.safetensors")
    assert_same({"a.b": arrays["a"]["b"], "c": arrays["c"], "d": arrays["d"]}, dict(sorted(read.items())))


def corruptions() -> list[tuple[str, str]]:
    files = ["actor.safetensors", "run.safetensors", "state.json", "config.json", "manifest.json"]
    return [
        (file, how) for file in files for how in ("truncate", "empty", "flip", "append", "delete", "link", "folder")
    ]


@pytest.mark.parametrize(("file", "how"), corruptions())
def test_damage_to_any_file_is_refused_by_name(tmp_path: Path, file: str, how: str) -> None:
    path = save(tmp_path / "step_7")
    target = path / file
    data = target.read_bytes()
    if how == "delete":
        target.unlink()
    elif how == "link":
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
    elif how == "folder":
        target.unlink()
        target.mkdir()
    else:
        flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        target.write_bytes({"truncate": data[:-1], "empty": b"", "flip": flipped, "append": data + b" ."}[how])
    for check in (load_checkpoint, open_checkpoint):
        with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
            check(path)


@pytest.mark.parametrize("file", ["actor.safetensors", "state.json", "config.json", "manifest.json"])
def test_no_flipped_byte_goes_unnoticed(tmp_path: Path, file: str) -> None:
    path = save(tmp_path / "step_7")
    data = (path / file).read_bytes()
    for i in range(0, len(data), max(1, len(data) // 60)):
        (path / file).write_bytes(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_an_added_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "step_7")
    (path / "extra.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"extra\.json does not belong"):
        load_checkpoint(path)


def edit_manifest(path: Path, *, seal: bool = True, **changes: Any) -> None:
    """Change the manifest; `seal` also renews its checksum, as one who means harm would."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.update(changes)
    manifest.pop("checksum")
    checksum = checkpoint_format.body_checksum(manifest) if seal else "0" * 64
    (path / "manifest.json").write_text(json.dumps({**manifest, "checksum": checksum}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "something else"}, "its format is 'something else'"),
        ({"version": 3}, "format version 3.*pip install --upgrade"),
        ({"version": 1}, r"format version 1, written by .* reads 2: use that version, or train again"),
        ({"version": 0}, "was changed"),
        ({"version": "1"}, "was changed"),
        ({"version": "2"}, "was changed"),
        ({"files": {}}, "does not list"),
        ({"files": []}, "does not list"),
        ({"info": {}}, "global_step"),
        ({"info": 5}, "manifest.json is not valid: info"),
        ({"info": {"global_step": {"$run": "x"}}}, "unknown entry"),
    ],
)
def test_manifests_that_are_not_ours(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "c")
    edit_manifest(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    edit_manifest(path, seal=False, info={"global_step": 8})
    with pytest.raises(CheckpointError, match=r"manifest\.json was changed"):
        load_checkpoint(path)
    edit_manifest(path, seal=False, version=1)
    with pytest.raises(CheckpointError, match=r"manifest\.json was changed"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "a/b", "..", ""])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "c")
    (tmp_path / "outside.json").write_text("{}")
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit_manifest(path, files={**files, name: {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"weight":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,399999999996]}}',
        b'{"weight":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}',
        b'{"weight":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}}',
        b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
        b'{"weight":5}',
        b"[" * 100_000,
    ],
)
def test_hostile_headers_with_right_checksums_are_refused(tmp_path: Path, header: bytes) -> None:
    path = save(tmp_path / "c")
    data = struct.pack("<Q", len(header)) + header + b"\0" * 8
    (path / "actor.safetensors").write_bytes(data)
    files = json.loads((path / "manifest.json").read_text())["files"]
    files["actor.safetensors"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(path, files=files)
    with pytest.raises(CheckpointError, match=r"actor\.safetensors is damaged"):
        load_checkpoint(path)


def test_find_takes_the_newest_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (9, 100, 20):
        save(folder / step_dir_name(step), step=step)
    save(folder / "best", step=500)
    newest = folder / "step_100"
    assert (
        open_checkpoint(tmp_path / "run").path
        == open_checkpoint(str(folder)).path
        == open_checkpoint(newest).path
        == newest
    )
    assert open_checkpoint(folder / "best").path == folder / "best"


def test_find_takes_the_best_where_there_is_no_other(tmp_path: Path) -> None:
    """As a run leaves it that was killed before its first regular checkpoint."""
    save(tmp_path / "run" / "checkpoints" / "best", step=5)
    assert open_checkpoint(tmp_path / "run").path == tmp_path / "run" / "checkpoints" / "best"


def test_find_passes_over_damaged_ones_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / step_dir_name(step), step=step)
    (tmp_path / "step_3" / "manifest.json").unlink()
    weights = tmp_path / "step_2" / "actor.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    with pytest.warns(UserWarning, match="damaged checkpoint") as caught:
        assert open_checkpoint(tmp_path).path == tmp_path / "step_1"
    assert "step_3" in str(caught[0].message)
    assert "step_2" in str(caught[1].message)
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="every checkpoint in"):
        open_checkpoint(tmp_path)


def test_find_explains_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "step_3").mkdir()
    (tmp_path / "empty").mkdir()
    for name, message in [("nowhere", "does not exist"), ("file", "is a file"), ("step_3", "no manifest.json")]:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no such directory"):
        load_checkpoint(tmp_path / "nowhere")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, in order."""
    files: list[Path] = []
    original = checkpoints._open_checked

    def note(file: Path, entry: dict[str, Any]) -> Any:
        files.append(file)
        return original(file, entry)

    monkeypatch.setattr(checkpoints, "_open_checked", note)
    return files


def test_only_the_parts_asked_for_are_read(tmp_path: Path, opened: list[Path]) -> None:
    path = save(tmp_path / "step_7")
    for read in (load_checkpoint, open_checkpoint):
        opened.clear()
        loaded = read(path, parts=("actor", "normalizer"))
        assert list(loaded.state) == ["actor"]
        assert loaded.step == 7
        assert [file.name for file in opened] == ["actor.safetensors", "state.json", "config.json"]
        assert list(read(path, parts=()).state) == []


@pytest.mark.parametrize("how", ["flip", "delete", "truncate", "link", "folder"])
def test_damage_elsewhere_matters_only_to_who_reads_it(tmp_path: Path, how: str) -> None:
    """A file that is not needed may be gone, or anything of the right size; one of another size is refused."""
    path = save(tmp_path / "step_7")
    target = path / "run.safetensors"
    data = target.read_bytes()
    target.unlink()
    if how == "flip":
        target.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "truncate":
        target.write_bytes(data[:-1])
    elif how == "folder":
        target.mkdir()
    elif how == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        target.symlink_to(tmp_path / "elsewhere")
    for parts in (None, ("actor", "run")):
        with pytest.raises(CheckpointError, match=r"run\.safetensors"):
            load_checkpoint(path, parts)
    if how in ("flip", "delete"):
        assert_same(torch.arange(6.0).reshape(2, 3), load_checkpoint(path, ("actor",)).state["actor"]["weight"])
    else:
        with pytest.raises(CheckpointError, match=r"run\.safetensors"):
            load_checkpoint(path, ("actor",))


def test_a_run_folder_is_read_once(tmp_path: Path, opened: list[Path]) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints" / step_dir_name(step), step=step)
    assert open_checkpoint(tmp_path).step == 2
    assert len(opened) == len(set(opened)) == 4
    assert {file.parent.name for file in opened} == {"step_2"}


def test_opening_a_folder_passes_over_damaged_ones_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / step_dir_name(step), step=step)
    (tmp_path / "step_3" / "manifest.json").unlink()
    weights = tmp_path / "step_2" / "actor.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    with pytest.warns(UserWarning, match="damaged checkpoint, using step_1") as caught:
        assert open_checkpoint(tmp_path).step == 1
    assert ["step_3" in str(w.message) for w in caught] == [True, False]
    assert {w.filename for w in caught} == {__file__}
    with pytest.warns(UserWarning, match="damaged checkpoint, using step_2"):
        assert open_checkpoint(tmp_path, parts=("run",)).step == 2
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="every checkpoint in"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("read", [open_checkpoint])
def test_a_checkpoint_let_go_while_it_is_read_gives_way_to_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    save(tmp_path / "step_1", step=1)
    original, calls = checkpoints._open_checked, []

    def pruned_meanwhile(file: Path, entry: dict[str, Any]) -> Any:
        calls.append(file)
        if len(calls) == 2:
            save(tmp_path / "step_2", step=2)
            prune_checkpoints(tmp_path, 1)
        return original(file, entry)

    monkeypatch.setattr(checkpoints, "_open_checked", pruned_meanwhile)
    found = read(tmp_path)
    assert (found if isinstance(found, Path) else found.path) == tmp_path / "step_2"


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_slices_go_to_the_file_without_a_copy(kind: str) -> None:
    array = np.arange(600, dtype=np.float32).reshape(2, 50, 6)
    parts = [array[0, 10:], array[1, :10]]
    if kind == "tensor":
        given: list[Any] = [torch.from_numpy(part) for part in parts]
    else:
        given = parts
        for part in parts:
            part.flags.writeable = False
    tensors: dict[str, Any] = {}
    state_files.encode({"obs": given}, ("replay",), tensors)
    blocks = list(state_files.safetensors_blocks(tensors))[1:]
    assert [bytes(block) for block in blocks] == [part.tobytes() for part in parts]
    assert all(np.shares_memory(np.frombuffer(block, np.uint8), array) for block in blocks)


def test_prune_keeps_the_newest_and_best(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "step_100", "step_20", "best"):
        save(tmp_path / name)
    (tmp_path / "step_notes").mkdir()
    prune_checkpoints(tmp_path, 0)
    assert len(os.listdir(tmp_path)) == 6
    prune_checkpoints(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["best", "step_100", "step_20", "step_notes"]
    prune_checkpoints(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["best", "step_100", "step_notes"]
    with pytest.raises(ValueError, match="keep"):
        prune_checkpoints(tmp_path, -1)


def test_replacing_leaves_one_whole_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "best", {"a": {"x": torch.ones(3)}, "gone": {"y": torch.ones(3)}}, step=1)
    save(tmp_path / "best", {"a": {"x": torch.zeros(3)}}, step=2)
    loaded = load_checkpoint(tmp_path / "best")
    assert loaded.step == 2
    assert list(loaded.state) == ["a"]
    assert os.listdir(tmp_path) == ["best"]


@pytest.mark.parametrize("moment", ["before the first rename", "between the renames", "while writing"])
def test_a_crash_while_replacing_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    best = save(tmp_path / "step_5", step=1)
    rename = Path.rename

    def crash(source: Path, target: Path) -> Path:
        if moment == "before the first rename" or source.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(source, target)

    def crash_write(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "while writing":
            patch.setattr(checkpoints, "_write_content", crash_write)
        else:
            patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            save(best, step=2)
    assert load_checkpoint(best).step == 1
    assert open_checkpoint(tmp_path).path == open_checkpoint(best).path == best
    assert load_checkpoint(save(best, step=3)).step == 3
    assert os.listdir(tmp_path) == ["step_5"]


def test_a_reader_meets_the_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = save(tmp_path / "best", step=1)
    read_manifest, calls = checkpoints._read_manifest, []

    def replaced_after(directory: Path, *args: Any) -> dict[str, Any]:
        manifest = read_manifest(directory, *args)
        calls.append(directory)
        if len(calls) == 1:
            save(best, {"other": {}}, step=2)
        return manifest

    monkeypatch.setattr(checkpoints, "_read_manifest", replaced_after)
    assert load_checkpoint(best).step == 2
    assert len(calls) == 2


WRITER = """
import sys
from pathlib import Path
import numpy as np
from rl_training.runtime.checkpoints import prune_checkpoints, save_checkpoint
folder = Path(sys.argv[1])
for step in range(int(sys.argv[2]), 10**9):
    state = {"part": {"x": np.full(100_000, step), "y": [step]}}
    for name in ("best", f"step_{step}"):
        save_checkpoint(folder / name, state=state, config={}, info={"global_step": step})
    prune_checkpoints(folder, 2)
    print(step, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_writer_never_costs_a_checkpoint(tmp_path: Path) -> None:
    last = 0
    for attempt in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(last + 1)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        last = int(writer.stdout.readline())
        time.sleep(0.013 * attempt)
        writer.send_signal(signal.SIGKILL)
        last = int(([str(last), *writer.stdout.read().split("\n")[:-1]])[-1])
        writer.wait()
        for path in (open_checkpoint(tmp_path).path, tmp_path / "best"):
            loaded = load_checkpoint(path)
            assert loaded.step >= last
            assert loaded.state["part"]["y"] == [loaded.step]
            assert (loaded.state["part"]["x"] == loaded.step).all()
        last = load_checkpoint(open_checkpoint(tmp_path).path).step
    save(tmp_path / "step_0")
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


STAGES = {  # what is called while a checkpoint is read, and before which call the run lets it go
    "before the manifest": ("_read_manifest", 1),
    "before the first file": ("_open_checked", 1),
    "before the second file": ("_open_checked", 2),
    "between checking and loading tensors": ("load_file", 1),
    "before the size of a part that is not read": ("_check_size", 1),
    "before the config": ("_read_json", 2),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("newer", [True, False])
def test_of_checkpoints_that_are_removed_while_they_are_read_the_next_is_taken(
    stage: str, newer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"part": {"x": np.arange(5)}, "other": {"y": np.arange(3)}}
    for step in (1, 2):
        save(tmp_path / f"step_{step}", state, step=step)
    name, which = STAGES[stage]
    original, calls = getattr(checkpoints, name), []

    def removed_before(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == which:
            if newer:
                save(tmp_path / "step_3", state, step=3)
            shutil.rmtree(tmp_path / "step_2")
        return original(*args)

    monkeypatch.setattr(checkpoints, name, removed_before)
    parts = ["part"] if name == "_check_size" else None
    assert open_checkpoint(tmp_path, parts).step == (3 if newer else 1)


def test_a_checkpoint_that_replaces_the_only_one_during_a_listing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "step_2", step=2)
    original, calls = os.listdir, []

    def replaced_after(directory: Path) -> list[str]:
        names = original(directory)
        calls.append(directory)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "step_2")
            save(tmp_path / "step_3", step=3)
        return names

    monkeypatch.setattr(checkpoints.os, "listdir", replaced_after)
    assert open_checkpoint(tmp_path).step == 3


def test_a_missing_file_reported_by_the_tensor_library_is_a_missing_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its versions say so by a RuntimeError."""
    for step in (1, 2):
        save(tmp_path / f"step_{step}", {"part": {"x": np.arange(5)}}, step=step)
    original = checkpoints.load_file

    def removed(file: Path) -> Any:
        if file.parent.name == "step_2":
            shutil.rmtree(file.parent)
            raise RuntimeError("unable to open file: it does not exist")
        return original(file)

    monkeypatch.setattr(checkpoints, "load_file", removed)
    assert open_checkpoint(tmp_path).step == 1


@pytest.mark.skipif(atomic_files.fcntl is None, reason="needs file locks")
def test_a_temporary_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = atomic_files.lock, []

    def swept(directory: Path, **options: Any) -> int | None:
        calls.append(directory)
        if len(calls) == 1:
            shutil.rmtree(directory)
        return original(directory, **options)

    monkeypatch.setattr(atomic_files, "lock", swept)
    assert load_checkpoint(save(tmp_path / "step_3")).step == load_checkpoint(tmp_path / "step_3").step
    assert len(calls) == 2


@pytest.mark.skipif(atomic_files.fcntl is None, reason="needs file locks")
def test_only_the_atomic_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".step_1.99-a.tmp", tmp_path / ".step_2.99-a.tmp"
    for path in (dead, alive):
        path.mkdir()
        (path / "part.safetensors").write_bytes(b"half")
    lock = atomic_files.lock(alive)
    assert lock is not None
    save(tmp_path / "step_3")
    assert not dead.exists()
    assert alive.exists()
    os.close(lock)
    save(tmp_path / "step_3")
    assert os.listdir(tmp_path) == ["step_3"]
