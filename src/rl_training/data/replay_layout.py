"""How the rows of a replay lie in memory, and how many bytes they take."""

from __future__ import annotations

from rl_training.data.batch import tree_map
from rl_training.data.fields import num_bytes
from rl_training.types import Field, Fields, State

NOT_COLUMNS = ("obs", "first")  # observations lie apart, and where an episode begins is known from its rows
GAP = 16  # one part in so many is spare: it is written to while a checkpoint reads the rest


def ring_rows(capacity: int, num_envs: int, frame_stack: int) -> tuple[int, int]:
    """Rows of each environment: (those that can be drawn, those and the spare ones)."""
    rows = -(-capacity // num_envs)
    return rows, rows + max(frame_stack, rows // GAP) + 2


def stored_fields(fields: Fields, frame_stack: int) -> Fields:
    """The fields of a row: of stacked frames only the newest."""
    if frame_stack == 1:
        return fields
    return {**fields, "obs": tree_map(lambda field: field._replace(shape=field.shape[1:]), fields["obs"])}


def saved_fields(state: State) -> Fields:
    """The fields of a row in a state that was saved."""
    saved = {"obs": state["obs"], **state["columns"]}
    fields: Fields = tree_map(lambda parts: Field(parts[0].shape[1:], parts[0].dtype), saved)
    return fields


def replay_bytes(
    capacity: int, num_envs: int, fields: Fields, *, frame_stack: int = 1, prioritized: bool = False
) -> tuple[int, int]:
    """What a Replay of this kind allocates: (observations, all with them)."""
    places = num_envs * ring_rows(capacity, num_envs, frame_stack)[1]
    obs = places * num_bytes({"obs": stored_fields(fields, frame_stack)["obs"]})
    columns = places * (num_bytes({key: field for key, field in fields.items() if key not in NOT_COLUMNS}) + 1)  # valid
    return obs, obs + columns + (_priorities_bytes(places) if prioritized else 0)


def _priorities_bytes(places: int) -> int:
    """A priority of each place, and a tree of twice as many sums as leaves, whose number is a power of two."""
    return 8 * (places + (2 << max(places - 1, 0).bit_length()))
