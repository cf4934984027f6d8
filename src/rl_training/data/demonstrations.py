"""Episodes of an expert, as arrays in an npz file that no code runs to read."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.errors import InputError
from rl_training.types import Array, Observation

FORMAT = "rl-training demonstrations 1"
COLUMNS = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)  # what numpy raises
REMEDY = "make it again with `rl-training demos`"


@dataclass(frozen=True)
class Demonstrations:
    """The steps of all episodes, one after the other.

    Observations are as models read them (flat, float32 or uint8, categories from 0) but not normalised. Actions are as
    the environment took them: how a policy represents its actions depends on its algorithm.
    """

    env_id: str
    observation_space: dict[str, Any]  # of the environment, as JSON
    action_space: dict[str, Any]
    obs: Observation  # [S, ...]
    next_obs: Observation
    action: Array  # [S, ...]
    reward: Array  # [S]
    terminated: Array  # [S]
    truncated: Array  # [S]
    episode_end: Array  # [E] the number of steps up to the end of each episode

    @property
    def num_steps(self) -> int:
        return len(self.action)

    @property
    def lengths(self) -> Array:
        """[E] The steps of each episode."""
        return np.diff(self.episode_end, prepend=0)

    @property
    def returns(self) -> Array:
        """[E] The return of each episode."""
        return np.array([part.sum(dtype=np.float64) for part in np.split(self.reward, self.episode_end[:-1])])

    @property
    def checksum(self) -> str:
        """Of what is learned from: observations and actions."""
        digest = hashlib.sha256()
        for key, array in [*named_arrays("obs", self.obs), ("action", self.action)]:
            digest.update(f"{key} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def named_arrays(name: str, obs: Observation) -> Iterator[tuple[str, Array]]:
    """`obs`, or `obs.camera` and `obs.pose` where an observation has several arrays."""
    if isinstance(obs, dict):
        yield from ((f"{name}.{key}", array) for key, array in obs.items())
    else:
        yield name, obs


def file_content(demonstrations: Demonstrations) -> dict[str, Array]:
    """The arrays of the file."""
    about = {
        "format": FORMAT,
        "env_id": demonstrations.env_id,
        "observation_space": demonstrations.observation_space,
        "action_space": demonstrations.action_space,
    }
    obs, next_obs = (named_arrays(name, getattr(demonstrations, name)) for name in ("obs", "next_obs"))
    columns = {name: getattr(demonstrations, name) for name in ("action", *COLUMNS, "episode_end")}
    return {"about": np.array(json.dumps(about)), **dict(obs), **dict(next_obs), **columns}


def read_demonstrations(path: Path | str) -> Demonstrations:
    """Read a file. Raises an InputError where it is missing, damaged or empty."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} {'is no file' if path.exists() else 'does not exist'}; {REMEDY}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        if not isinstance(about, dict) or about.pop("format") != FORMAT:
            raise InputError(f"its format is not {FORMAT!r}")
        obs, next_obs = (_observation(name, arrays) for name in ("obs", "next_obs"))
        found = Demonstrations(**about, obs=obs, next_obs=next_obs, **arrays)
        check_demonstrations(found)
        return found
    except (*UNREADABLE, ValueError, TypeError, KeyError) as error:
        known = isinstance(error, InputError)
        cause = error if known else f"it is damaged ({type(error).__name__}: {error})"
        raise InputError(f"{path} does not hold demonstrations: {cause}; {REMEDY}") from error


def _observation(name: str, arrays: dict[str, Array]) -> Observation:
    """Take the arrays of one observation out of `arrays`."""
    if name in arrays:
        return arrays.pop(name)
    keys = [key for key in arrays if key.startswith(f"{name}.")]
    if not keys:
        raise InputError(f"it has no {name}")
    return {key.removeprefix(f"{name}."): arrays.pop(key) for key in keys}


def check_demonstrations(found: Demonstrations) -> None:
    """Raise an InputError where arrays do not fit together, or a number is not finite."""
    size = found.num_steps
    if not size or not len(found.episode_end):
        raise InputError("it has no steps")
    columns = {name: getattr(found, name) for name in COLUMNS}
    entries = [*named_arrays("obs", found.obs), *named_arrays("next_obs", found.next_obs), *columns.items()]
    for name, array in [*entries, ("action", found.action)]:
        if array.ndim < 1 or len(array) != size:
            raise InputError(f"it has {size} actions, but {name} has shape {array.shape}")
        if array.dtype.kind not in "fiub":
            raise InputError(f"{name} should be numbers, got dtype {array.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(f"{name} is not finite")
    for name, dtype in COLUMNS.items():
        if columns[name].shape != (size,) or columns[name].dtype != dtype:
            raise InputError(f"{name} should be {np.dtype(dtype)} of shape {(size,)}")
    ends = found.episode_end
    if ends.ndim != 1 or ends.dtype.kind != "i" or ends[-1] != size or (np.diff(ends, prepend=0) <= 0).any():
        raise InputError(f"episode_end should rise to the number of steps, {size}")
