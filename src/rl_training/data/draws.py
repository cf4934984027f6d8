"""Uniform draws of places from a ring: single steps, and windows of rows."""

from __future__ import annotations

import numpy as np

from rl_training.config import InputError
from rl_training.data.ring import Ring
from rl_training.types import Array


def draw_steps(ring: Ring, count: int, rng: np.random.Generator) -> Array:
    """[B] Places of steps. Places without a step that can be drawn are drawn again."""
    written = int(min(ring.cursor.max() + 1, ring.length))  # rows, in the environment that has the most
    place = _draw_written(ring, count, written, rng)
    while (wrong := np.flatnonzero(~ring.valid[place])).size:
        place[wrong] = _draw_written(ring, len(wrong), written, rng)
    return place


def _draw_written(ring: Ring, count: int, written: int, rng: np.random.Generator) -> Array:
    """[B] Places among the first `written` places of every environment."""
    drawn = rng.integers(0, ring.num_envs * written, count)
    return drawn if written == ring.length or ring.num_envs == 1 else ring.places(drawn // written, drawn % written)


def draw_windows(ring: Ring, count: int, length: int, rng: np.random.Generator) -> Array:
    """[B, L] Places of windows of L complete rows. Every row from which L complete rows are known is equally likely."""
    if ring.frame_stack > 1:
        raise InputError(
            f"a replay of stacked frames (frame_stack: {ring.frame_stack}) has no windows: remove frame_stack from "
            "env_kwargs.wrappers"
        )
    oldest, end = ring.complete_rows()
    starts = np.maximum(0, end - oldest - length + 1)  # [N] rows at which a window can start
    if not starts.any():
        raise InputError(
            f"no environment has the {length:,} rows of a window yet, the most is {(end - oldest).max():,}: add more "
            f"steps first, or draw shorter windows (the replay keeps {ring.rows:,} rows of each environment)"
        )
    up_to = np.cumsum(starts)  # [N] starts in this environment and those before it
    drawn = rng.integers(0, up_to[-1], count)
    env = np.searchsorted(up_to, drawn, side="right")
    row = oldest[env] + drawn - (up_to - starts)[env]
    return ring.places(env[:, None], row[:, None] + np.arange(length))
