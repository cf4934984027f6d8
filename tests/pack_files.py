"""Packs of short runs, and what is in them."""

from __future__ import annotations

import hashlib
import json
import zipfile

from rl_training import train
from rl_training.runtime.checkpoint_format import body_checksum

SHORT = {"total_timesteps": 64, "eval_episodes": 2}
WRAPPED = {"env_kwargs": {"wrappers": {"normalize_observation": True}}}
EVALUATED = WRAPPED | {"eval_interval": 32}
RUNS = {}


def run_of(tiny_config, algo, config=None, **kwargs):
    """The folder of a short run, trained once."""
    key = algo, json.dumps([config, kwargs])
    if key not in RUNS:
        RUNS[key] = train(tiny_config(algo, SHORT | (config or {}), **kwargs), progress="silent").run_dir
    return RUNS[key]


def entries(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def in_checkpoint(path):
    return {name.split("/")[-1] for name in entries(path) if name.startswith("checkpoints/")}


def zipped(path, contents, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def seal(checkpoint, name):
    """Let the manifest of a checkpoint fit a file that was changed."""
    path = checkpoint / "manifest.json"
    data = (checkpoint / name).read_bytes()
    path.write_bytes(sealed(path.read_bytes(), name, data))


def sealed(manifest, name, data):
    body = json.loads(manifest)
    body.pop("checksum")
    body["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return json.dumps(body | {"checksum": body_checksum(body)}).encode()
