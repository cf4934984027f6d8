"""A replay as a state for checkpoints: what is saved of a ring, and the checks of what is loaded into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.data.batch import tree_map
from rl_training.data.ring import Ring
from rl_training.data.state_check import MOST, compare_state
from rl_training.errors import InputError
from rl_training.types import Array, State

if TYPE_CHECKING:
    from rl_training.data.priorities import Priorities


def hold_rows(ring: Ring) -> Callable[[], None]:
    """Keep the rows of `ring_state` unchanged until the function returned is called."""
    oldest = oldest_saved(ring)
    return ring.holds.hold(oldest, ring.cursor - oldest)


def ring_state(ring: Ring, priorities: Priorities | None) -> State:
    """What can be drawn, as views of the ring and not as copies: see `hold_rows`."""
    state: State = {
        "rows": ring.rows,
        "added": ring.added,
        "cursor": ring.cursor.copy(),
        "in_episode": ring.in_episode.copy(),
        "priorities": priorities.state_dict() if priorities else None,
    }
    if not ring.cursor.any():
        return state
    observed, complete = saved_slices(ring)
    return state | {
        "obs": tree_map(lambda x: [x[part] for part in observed], ring.obs),
        "columns": {key: [column[part] for part in complete] for key, column in ring.columns.items()},
        "valid": [ring.valid[part].copy() for part in complete],
    }


def load_ring_state(ring: Ring, priorities: Priorities | None, state: State) -> None:
    """Load a state into an empty ring. The state must hold the fields of the ring."""
    check_ring_state(ring, state)
    ring.cursor, ring.in_episode = state["cursor"].copy(), state["in_episode"].copy()
    ring.added = state["added"]
    if "obs" not in state:
        return
    observed, complete = saved_slices(ring)
    fill(ring.obs, state["obs"], observed, "replay.obs")
    fill(ring.columns, state["columns"], complete, "replay.columns")
    fill(ring.valid, state["valid"], complete, "replay.valid")
    ring.size = int(ring.valid.sum())
    if priorities:
        priorities.load_state_dict(state["priorities"])
        if (priorities.priority > 0)[~ring.valid].any():
            raise ValueError("replay.priorities has some of steps that cannot be drawn")


def check_ring_state(ring: Ring, state: State) -> None:
    """Raise an error where the state does not fit the ring. `fill` checks the arrays."""
    expected = {"rows": int, "added": int, "cursor": np.ndarray, "in_episode": np.ndarray, "priorities": object}
    content = {"obs": object, "columns": dict, "valid": list}
    compare_state(expected | (content if "obs" in state else {}), state, "replay")
    cursor, in_episode = state["cursor"], state["in_episode"]
    if state["rows"] != ring.rows or len(cursor) != ring.num_envs:
        raise InputError(
            f"the saved replay has {state['rows']:,} rows for each of {len(cursor)} environments, this one "
            f"{ring.rows:,} for {ring.num_envs}: keep buffer_capacity and num_envs when resuming"
        )
    compare_state(ring.cursor, cursor, "replay.cursor")
    compare_state(ring.in_episode, in_episode, "replay.in_episode")
    if not 0 <= cursor.min() <= cursor.max() < MOST // 2:
        raise ValueError(f"replay.cursor should count rows, got {cursor.tolist()}")
    if ("obs" in state) != bool(cursor.any() or in_episode.any()):
        raise ValueError("replay.cursor and replay.obs do not agree on whether there are steps")


def fill(tree: Any, parts: Any, slices: list[slice], entry: str) -> None:
    """Write saved parts [rows, ...] to slices of an array, or of every array in a dict."""
    if isinstance(tree, dict):
        compare_state(dict.fromkeys(tree, object), parts, entry)
        for key, branch in tree.items():
            fill(branch, parts[key], slices, f"{entry}.{key}")
    else:
        compare_state([tree[place] for place in slices], parts, entry)
        for place, rows in zip(slices, parts, strict=True):
            tree[place] = rows


def oldest_saved(ring: Ring) -> Array:
    """[N] The oldest rows that are saved: those that can be drawn, and the stacked frames before them.

    Where an episode has just ended, the newest row is not at the cursor but before it: hence one row more.
    """
    oldest: Array = np.maximum(0, ring.cursor - ring.rows - ring.frame_stack)
    return oldest


def saved_slices(ring: Ring) -> tuple[list[slice], list[slice]]:
    """(slices of the rows that have an observation, slices of the rows that are complete)

    The row at the cursor has an observation but no step where an episode is in progress.
    """
    oldest = oldest_saved(ring)
    return row_slices(ring, oldest, ring.cursor + ring.in_episode), row_slices(ring, oldest, ring.cursor)


def row_slices(ring: Ring, begin: Array, end: Array) -> list[slice]:
    """The places of rows `begin` [N] to `end` [N] of each environment: two slices where they wrap around."""
    slices = []
    for env, (start, stop) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        base, first, last = env * ring.length, start % ring.length, (stop - 1) % ring.length + 1
        if stop > start and first < last:
            slices.append(slice(base + first, base + last))
        elif stop > start:
            slices += [slice(base + first, base + ring.length), slice(base, base + last)]
    return slices
