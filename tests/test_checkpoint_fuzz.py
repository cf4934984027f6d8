"""Checkpoints whose checksums fit and whose content does not: refused by one error, and nothing is left behind.

A seeded mutator changes one entry of a sound checkpoint at a time: it is removed, replaced by another type or by an
absurd number; of arrays, also the shape or the dtype changes. The checksums are then made to fit.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import zlib

import numpy as np
import pytest
import safetensors.numpy
import torch

from conftest import ENVS, TINY
from rl_training import CheckpointError, TrainConfig, evaluate_checkpoint, load_policy, resume_training, train
from rl_training.errors import InputError
from rl_training.runtime import checkpoint_format, checkpoints
from rl_training.runtime.randomness import global_state
from rl_training.runtime.run import TrainingRun
from test_contract import assert_equal_state

CASES = {"ppo": 110, "ppg": 30, "dqn": 100, "sac": 60, "muzero": 30, "scalezero": 20}
PLAIN = [None, True, -1, 0, 1, 0.5, -0.5, "x", "", [], {}, [1, 2], {"a": 1}]
ABSURD = [2**31, 2**62, -(2**62), 1e308, {"$int": hex(2**80)}, {"$float": "7ff8000000000000"}, {"$int": "zz"}]
ABSURD += [{"$tensor": "nothing"}, {"$array": "nothing"}, {"$dict": 3}, {"$what": 1}, {"$float": "00"}]
DTYPES = [np.float64, np.float32, np.int64, np.int32, np.uint8, np.bool_]
NORMALISED = {"normalize_observation": True, "normalize_reward": True, "time_limit": 5}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sound checkpoint of each algorithm, after a few updates, with normalisers and replays under way."""
    made = {}

    def make(algo):
        if algo not in made:
            folder = tmp_path_factory.mktemp(algo)
            config = TrainConfig(
                algo=algo,
                env_id=ENVS[algo],
                total_timesteps=256,
                num_envs=2,
                eval_episodes=1,
                output_dir=folder,
                device="cpu",
                env_kwargs={"wrappers": NORMALISED},
                algo_kwargs={**TINY[algo], "learning_rate": {"kind": "linear", "start": 1e-3, "end": 1e-4}},
            )
            stop = lambda run: run.stop("half way") if run.step >= 48 else None  # noqa: E731
            made[algo] = train(config, callbacks=[stop], progress="silent").checkpoint_path
        return made[algo]

    return make


def places(tree, path=()):
    """Every entry of nested dicts and lists, by its path."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def change_json(tree, rng, values):
    # First a depth, then a place: long lists of numbers at the bottom would else take nearly all mutations.
    found = list(places(tree))
    depth = rng.choice(sorted({len(path) for path in found}))
    path = rng.choice([path for path in found if len(path) == depth])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    if rng.random() < 0.3:
        del parent[path[-1]]
        return f"without {path}"
    parent[path[-1]] = value = copy.deepcopy(rng.choice(values))
    return f"{path} = {value}"


def change_arrays(arrays, rng):
    name = rng.choice(sorted(arrays))
    kind, array = rng.choice(["remove", "shape", "empty", "dtype", "negative", "not a number", "scalar"]), arrays[name]
    if kind == "remove":
        del arrays[name]
    elif kind == "shape":
        arrays[name] = np.concatenate([array.reshape(-1), array.reshape(-1)[:1]])
    elif kind == "empty":
        arrays[name] = array.reshape(-1)[:0]
    elif kind == "dtype":
        arrays[name] = array.astype(rng.choice([dtype for dtype in DTYPES if dtype != array.dtype]))
    elif kind == "negative":
        arrays[name] = np.full_like(array, -1) if array.dtype.kind in "if" else ~array
    elif kind == "not a number":
        arrays[name] = np.full_like(array, np.nan if array.dtype.kind == "f" else 0)
    else:
        arrays[name] = np.zeros((), array.dtype)
    return f"{kind} of {name}"


def mutate(directory, rng):
    """Change one thing of a checkpoint and let the checksums fit; says what."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest.pop("checksum")
    tensors = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
    name = rng.choice(["state.json", "state.json", "config.json", "info", *tensors])
    if name == "info":
        what = change_json(manifest["info"], rng, PLAIN + ABSURD)
    elif name in tensors:
        arrays = safetensors.numpy.load_file(directory / name)
        what = change_arrays(arrays, rng)
        safetensors.numpy.save_file(arrays, directory / name)
    else:
        tree = json.loads((directory / name).read_text())
        # A config with huge but valid sizes is a config: only what cannot be one is tried.
        what = change_json(tree, rng, PLAIN + ABSURD if name == "state.json" else [*PLAIN, 10**30])
        (directory / name).write_text(json.dumps(tree))
    (directory / "manifest.json").write_text(json.dumps(manifest))
    seal(directory)
    return f"{name}: {what}"


def seal(directory):
    """Let the manifest fit what the files hold now."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest.pop("checksum", None)
    for file in manifest["files"]:
        data = (directory / file).read_bytes()
        manifest["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["checksum"] = checkpoint_format.body_checksum(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


class Built(Exception):
    """The run could be made."""


@pytest.fixture
def only_built(monkeypatch):
    """A run that is resumed is made as far as its folder, and then ends."""
    original = TrainingRun.__enter__

    def enter(run):
        if run.resume is None:
            return original(run)
        run.log.close()
        run.undo.close()
        raise Built

    monkeypatch.setattr(TrainingRun, "__enter__", enter)


def attempt(use, what):
    """Whether it works; if not, by an error that says so."""
    try:
        use()
    except Built:
        return True
    except InputError:
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return True


def check_case(source, folder, rng):
    """Mutate a copy of `source` and use it in every way; gives the number of refusals."""
    directory = folder / "step_48"
    shutil.copytree(source, directory)
    what = mutate(directory, rng)
    threads, generators, output = torch.get_num_threads(), global_state(), folder / "out"
    output.mkdir()
    worked = [
        attempt(lambda: load_policy(directory), what),
        attempt(lambda: evaluate_checkpoint(directory, num_episodes=1), what),
    ]
    resumed = attempt(lambda: resume_training(directory, output_dir=output, progress="silent"), what)
    if not resumed:
        assert list(output.iterdir()) == [], what
        assert torch.get_num_threads() == threads, what
        assert_equal_state(global_state(), generators, what)
    shutil.rmtree(folder)
    return (*worked, resumed).count(False)


@pytest.mark.parametrize("algo", CASES)
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_checkpoint_holds_it_works_or_is_refused(algo, sound, only_built, tmp_path):
    rng = random.Random(zlib.crc32(algo.encode()))
    refused = [check_case(sound(algo), tmp_path / str(i), rng) for i in range(CASES[algo])]
    assert sum(map(bool, refused)) > CASES[algo] // 3  # most mutations matter


def test_the_error_names_file_and_entry(sound, tmp_path, only_built):
    directory = tmp_path / "step_48"
    shutil.copytree(sound("ppo"), directory)
    arrays = safetensors.numpy.load_file(directory / "actor.safetensors")
    name = next(name for name in arrays if name.startswith("model.") and arrays[name].ndim == 2)
    changed = {**arrays, name: arrays[name].astype(np.float64)}
    safetensors.numpy.save_file(changed, directory / "actor.safetensors")
    seal(directory)
    for use in (load_policy, evaluate_checkpoint, resume_training):
        with pytest.raises(CheckpointError, match=rf"step_48.state\.json.*actor\.{name} should be float32 of shape"):
            use(directory)


@pytest.mark.parametrize("change", ["missing", "shape", "scalar"])
def test_attributes_of_a_vectorised_environment_are_checked(change, tmp_path, only_built):
    config = TrainConfig(
        algo="ppo",
        env_id="CartPole-v1",
        total_timesteps=64,
        num_envs=2,
        eval_episodes=1,
        output_dir=tmp_path / "runs",
        device="cpu",
        env_kwargs={"backend": "vector"},
        algo_kwargs=TINY["ppo"],
    )
    path = train(config, progress="silent").checkpoint_path
    checkpoint = checkpoints.load_checkpoint(path)
    values = checkpoint.state["runner"]["envs"]["attributes"]["values"]
    name = next(name for name, value in values.items() if isinstance(value, np.ndarray))
    changed = {"shape": np.zeros(7), "scalar": 3.0}
    values.pop(name) if change == "missing" else values.update({name: changed[change]})
    content = {"state": checkpoint.state, "config": checkpoint.config, "info": checkpoint.info}
    checkpoints.save_checkpoint(tmp_path / "step_64", **content)
    with pytest.raises(CheckpointError, match=rf"runner.*envs\.attributes\.values\.{name} should be an array"):
        resume_training(tmp_path / "step_64", total_timesteps=128, progress="silent")
