"""The steps before an observation, for policies that see more than one observation: see `History`."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_training.data.batch import tree_map
from rl_training.data.state_check import compare_state
from rl_training.errors import InputError
from rl_training.types import Array, History, Memory, Observation

OBS_PREFIX = "obs."  # of the entries of a Dict observation in a memory


def empty_history(obs: Observation, count: int) -> History:
    """The history of N episodes that begin with observations [N, ...]: length 0, with room for `count` steps."""
    num_envs = num_rows(obs)
    return {
        "obs": tree_map(lambda x: np.zeros((num_envs, count, *x.shape[1:]), x.dtype), obs),
        "action": np.zeros((num_envs, count), np.int64),
        "length": np.zeros(num_envs, np.int64),
    }


def extended_history(history: History, obs: Observation, action: Array) -> History:
    """The history without its oldest step, and with observations [N, ...] and actions [N] as its newest."""
    count = history["action"].shape[1]
    return {
        "obs": shifted(history["obs"], obs),
        "action": shifted(history["action"], action),
        "length": np.minimum(history["length"] + 1, count),
    }


def to_memory(history: History) -> Memory:
    """The history as a flat dict of arrays: `obs.<key>` is the entry <key> of a Dict observation."""
    obs = history["obs"]
    parts = {f"{OBS_PREFIX}{key}": part for key, part in obs.items()} if isinstance(obs, dict) else {"obs": obs}
    return {**parts, "action": history["action"], "length": history["length"]}


def to_history(memory: Memory) -> History:
    """The inverse of `to_memory`."""
    parts = {key.removeprefix(OBS_PREFIX): part for key, part in memory.items() if key.startswith(OBS_PREFIX)}
    return {"obs": parts or memory["obs"], "action": memory["action"], "length": memory["length"]}


def check_history(history: History, obs: Observation, count: int) -> None:
    """Raise an error where the history is not one of `count` steps before observations [N, ...]."""
    expected = empty_history(tree_map(lambda x: x[:0], obs), count)  # without rows: only shapes and dtypes are compared
    compare_state(expected, tree_map(lambda x: x[:0], history), "memory")
    check_rows(len(history["length"]), obs)


def check_rows(in_memory: int, obs: Observation) -> None:
    """Raise an error where a memory of `in_memory` rows is not that of the environments observed."""
    num_envs = num_rows(obs)
    if in_memory != num_envs:
        raise InputError(
            f"{num_envs} observations, but the memory is that of {in_memory} environments: begin with an empty memory "
            "(policy.reset()) when the number of environments changes"
        )


def num_rows(obs: Observation) -> int:
    """N of observations [N, ...]."""
    return len(next(iter(obs.values())) if isinstance(obs, dict) else obs)


def shifted(kept: Any, new: Any) -> Any:
    """[N, P, ...]: the last P - 1 entries of `kept` [N, P, ...], then `new` [N, ...]."""
    if isinstance(kept, dict):
        return {key: shifted(part, new[key]) for key, part in kept.items()}
    return np.concatenate([kept[:, 1:], np.asarray(new, kept.dtype)[:, None]], 1)
