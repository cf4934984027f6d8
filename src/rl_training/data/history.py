"""The steps before an observation, for policies that see more than the newest one: see `History`."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_training.config import InputError
from rl_training.data.batch import tree_map
from rl_training.data.state_check import compare_state
from rl_training.types import Array, History, Memory, Observation

PART = "obs."  # how the memory names the entries of a Dict observation


def empty_history(obs: Observation, count: int) -> History:
    """With room for `count` steps before observations [N, ...]. All of it is zero, as where an episode begins."""
    num_envs = num_rows(obs)
    return {
        "obs": tree_map(lambda x: np.zeros((num_envs, count, *x.shape[1:]), x.dtype), obs),
        "action": np.zeros((num_envs, count), np.int64),
        "length": np.zeros(num_envs, np.int64),
    }


def extended_history(history: History, obs: Observation, action: Array) -> History:
    """A new one that ends with these observations [N, ...] and actions [N], without the oldest step."""
    count = history["action"].shape[1]
    return {
        "obs": shifted(history["obs"], obs),
        "action": shifted(history["action"], action),
        "length": np.minimum(history["length"] + 1, count),
    }


def to_memory(history: History) -> Memory:
    """A history as flat arrays: `obs`, or one `obs.<key>` for each entry of a Dict observation."""
    obs = history["obs"]
    parts = {f"{PART}{key}": part for key, part in obs.items()} if isinstance(obs, dict) else {"obs": obs}
    return {**parts, "action": history["action"], "length": history["length"]}


def to_history(memory: Memory) -> History:
    parts = {key.removeprefix(PART): part for key, part in memory.items() if key.startswith(PART)}
    return {"obs": parts or memory["obs"], "action": memory["action"], "length": memory["length"]}


def check_history(history: History, obs: Observation, count: int) -> None:
    """An error where the history is not one of `count` steps before these observations."""
    expected = empty_history(tree_map(lambda x: x[:0], obs), count)  # no rows: shapes and dtypes are all that matters
    compare_state(expected, tree_map(lambda x: x[:0], history), "memory")
    remembered, seen = len(history["length"]), num_rows(obs)
    if remembered != seen:
        raise InputError(
            f"{seen} observations, but the memory is that of {remembered} environments: begin with an empty memory "
            "(policy.reset()) when the number of environments changes"
        )


def num_rows(obs: Observation) -> int:
    return len(next(iter(obs.values())) if isinstance(obs, dict) else obs)


def shifted(kept: Any, new: Any) -> Any:
    """[N, P, ...] without the first of P, and with [N, ...] in the last place."""
    if isinstance(kept, dict):
        return {key: shifted(part, new[key]) for key, part in kept.items()}
    return np.concatenate([kept[:, 1:], np.asarray(new, kept.dtype)[:, None]], 1)
