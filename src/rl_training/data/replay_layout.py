"""How many rows a replay has, what a row stores, and how many bytes all rows take."""

from __future__ import annotations

from rl_training.data.batch import tree_map
from rl_training.data.fields import num_bytes
from rl_training.types import Fields

SPARE_FRACTION = 1 / 16  # of the rows that can be drawn: so many more can be written while a checkpoint reads these


def ring_rows(capacity: int, num_envs: int, frame_stack: int) -> tuple[int, int]:
    """Rows of each environment: (those that can be drawn, all including the spare ones)."""
    rows = -(-capacity // num_envs)
    return rows, rows + max(frame_stack, int(rows * SPARE_FRACTION)) + 2


def stored_fields(fields: Fields, frame_stack: int) -> Fields:
    """The fields of a row. Of stacked frames it stores only the newest."""
    if frame_stack == 1:
        return fields
    return {**fields, "obs": tree_map(lambda field: field._replace(shape=field.shape[1:]), fields["obs"])}


def replay_bytes(
    capacity: int, num_envs: int, fields: Fields, *, frame_stack: int = 1, prioritized: bool = False
) -> tuple[int, int]:
    """What a Replay with these options allocates: (bytes of the observations, bytes of everything)."""
    places = num_envs * ring_rows(capacity, num_envs, frame_stack)[1]
    stored = stored_fields(fields, frame_stack)
    valid = 1
    total = places * (num_bytes(stored) + valid) + (_priorities_bytes(places) if prioritized else 0)
    return places * num_bytes({"obs": stored["obs"]}), total


def _priorities_bytes(places: int) -> int:
    """A priority for each place, and a sum tree: twice as many nodes as leaves, and a power of two of leaves."""
    return 8 * (places + (2 << max(places - 1, 0).bit_length()))
