"""The storage of a replay: the newest rows of N environments, each in a ring of its own.

An episode of n steps takes n + 1 rows: one for each step, and one for the last observation, which has no step. The
observation after a step is therefore that of the next row, and every observation is stored once. Where frames are
stacked, a row holds only the newest frame. The older frames of an episode's first stack have rows of their own before
it, because they are not always copies of the first frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import tree_map, upload
from rl_training.data.fields import num_bytes
from rl_training.errors import InputError
from rl_training.types import Array, Field, Fields, Observation, Step

SPARE_FRACTION = 1 / 16  # of the rows that can be drawn: so many more can be written while a checkpoint reads these


class Ring:
    """Arrays [N * length, ...]. A place is an index into them.

    The rows of an environment are counted from 0 on. Row r of environment e lies at place e * length + r % length.
    Steps can be drawn from the newest `rows` of these `length` rows. The others are spare: they can be written while a
    checkpoint reads the rows that can be drawn.
    """

    def __init__(self, capacity: int, num_envs: int, fields: Fields, *, frame_stack: int = 1) -> None:
        self.num_envs, self.frame_stack = num_envs, frame_stack
        self.rows, self.length = ring_rows(capacity, num_envs, frame_stack)
        stored = stored_fields(fields, frame_stack)
        self.obs: Any = tree_map(self._zeros, stored["obs"])
        self.columns: dict[str, Array] = {key: self._zeros(field) for key, field in stored.items() if key != "obs"}
        self.cursor = np.zeros(num_envs, np.int64)  # [N] the row that the next step is written to
        self.in_episode = np.zeros(num_envs, bool)  # [N] whether that row has its observation already
        self.valid = np.zeros(num_envs * self.length, bool)  # whether the row is a step that can be drawn
        self.size = 0  # steps that can be drawn
        self.added = 0  # steps ever added
        self.holds = Holds(self.length)
        self.device: torch.device | None = None  # of the copy of the observations
        self.device_obs: Any = None
        self._envs = np.arange(num_envs)

    def _zeros(self, field: Field) -> Array:
        return np.zeros((self.num_envs * self.length, *field.shape), field.dtype)

    def add(self, step: Step) -> tuple[Array, Array]:
        """Store one step of every live environment.

        Returns (places of these steps, places of steps now too old to draw).
        """
        env = self._envs
        if "live" in step:
            env = np.flatnonzero(step["live"])
            step = {key: tree_map(lambda x: x[env], step[key]) for key in ("obs", *self.columns, "next_obs")}
        expired = self._begin_episodes(step, env)
        place = self.place_at_cursor(env)
        for name, column in self.columns.items():
            column[place] = step[name]
        self.valid[place] = True
        self.size += len(env)
        self.added += len(env)
        self.cursor[env] += 1
        expired.append(self._write_obs(env, step["next_obs"]))
        ended = step["terminated"] | step["truncated"]
        if ended.any():
            self.in_episode[env[ended]] = False
            self._skip_row(env[ended])
        return place, np.concatenate(expired)

    def _begin_episodes(self, step: Step, env: Array) -> list[Array]:
        """Write the first observations of episodes. Returns the places of steps now too old to draw."""
        in_episode = self.in_episode[env]
        begins = step["first"] | ~in_episode
        if not begins.any():
            return []
        # An environment that could not be restored begins a new episode and leaves the old one without an end.
        cut = env[begins & in_episode]
        self.put(self.place_at_cursor(cut, -1), truncated=True)
        self._skip_row(cut)
        env, obs = env[begins], tree_map(lambda x: x[begins], step["obs"])
        expired = []
        for frame in range(self.frame_stack - 1):
            expired.append(self._write_obs(env, obs, frame))
            self._skip_row(env)
        expired.append(self._write_obs(env, obs))
        self.in_episode[env] = True
        return expired

    def _skip_row(self, env: Array) -> None:
        """Move the cursors on from rows without a step. The columns of these rows become zero."""
        place = self.place_at_cursor(env)
        for column in self.columns.values():
            column[place] = 0
        self.cursor[env] += 1

    def _write_obs(self, env: Array, obs: Observation, frame: int = -1) -> Array:
        """Write observations, or one frame of each, at the cursors. Returns the places of steps now too old to draw."""
        place = self.place_at_cursor(env)
        self.holds.wait(place)
        if self.frame_stack > 1:
            obs = obs[:, frame]  # type: ignore[index]
        write(self.obs, place, obs)
        if self.device is not None:
            write(self.device_obs, to_tensor(place, self.device), tree_map(lambda x: to_tensor(x, self.device), obs))
        oldest = self.place_at_cursor(env, -self.rows - 1)
        expired: Array = oldest[self.valid[oldest]]
        self.valid[expired] = False
        self.size -= len(expired)
        return expired

    def put(self, place: Array, **columns: Any) -> None:
        """Overwrite entries of columns at places [...]. Waits as long as a checkpoint reads these places."""
        self.holds.wait(place)
        for name, value in columns.items():
            self.columns[name][place] = value

    def place_at_cursor(self, env: Array, offset: int = 0) -> Array:
        """[E] The places `offset` rows after the cursors of environments [E]."""
        return self.places(env, self.cursor[env] + offset)

    def places(self, env: Array, row: Array) -> Array:
        """[...] The places of rows [...] of environments [...]."""
        place: Array = env * self.length + row % self.length
        return place

    def after(self, place: Array, offset: int | Array) -> Array:
        """The places `offset` rows after places [...], in the rings of the same environments."""
        begin = place // self.length * self.length
        after: Array = begin + (place - begin + offset) % self.length
        return after

    def age(self, place: Array) -> Array:
        """[...] How many rows the cursors are ahead of places [...]."""
        age: Array = (self.cursor[place // self.length] - place % self.length) % self.length
        return age

    def complete_rows(self) -> tuple[Array, Array]:
        """[N], [N] The first row that is not too old to be drawn, and the row after the last complete one.

        A row is complete if it has its step, or if it holds the last observation of an episode. The row at the cursor
        never is.
        """
        newest = self.cursor - ~self.in_episode  # that has an observation
        return np.maximum(0, newest - self.rows), self.cursor.copy()

    def observations(self, place: Array) -> Any:
        """[B, ...] The observations at places [B], frames stacked: arrays, or tensors where a device has a copy."""
        if self.frame_stack > 1:
            place = self.after(place[:, None], np.arange(1 - self.frame_stack, 1))
        if self.device is None:
            return tree_map(lambda x: x[place], self.obs)
        index = upload(np.ascontiguousarray(place), self.device)
        return tree_map(lambda x: x[index], self.device_obs)

    def copy_to_device(self, device: torch.device) -> bool:
        """Keep a copy of all observations on the device from now on. False: they do not fit."""
        try:
            self.device_obs = tree_map(lambda x: to_tensor(x, device), self.obs)
        except torch.cuda.OutOfMemoryError:
            return False
        self.device = device
        return True


def to_tensor(array: Array, device: torch.device | None) -> Tensor:
    """A copy on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, copy=True)


def write(tree: Any, place: Any, rows: Any) -> None:
    """Write rows [B, ...] at places [B] of an array or tensor, or of every one in a dict."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            write(branch, place, rows[key])
    else:
        tree[place] = rows


class Holds:
    """Ranges of rows, one range of each environment for each checkpoint that is being written.

    Whoever writes to the ring calls `wait` first. The thread that reads the rows releases them.
    """

    def __init__(self, length: int) -> None:
        """length: rows in the ring of one environment."""
        self.length = length
        self._ranges: list[tuple[Array, Array]] = []  # (first row [N], number of rows [N])
        self._released = threading.Condition()

    def hold(self, first: Array, count: Array) -> Callable[[], None]:
        """Hold `count` [N] rows from row `first` [N] on. The function returned releases them, from any thread."""
        held = (first, count)
        with self._released:
            self._ranges = [*self._ranges, held]

        def release() -> None:
            with self._released:
                self._ranges = [other for other in self._ranges if other is not held]
                self._released.notify_all()

        return release

    def wait(self, place: Array) -> None:
        """Return as soon as none of the places [...] is held."""
        if not self._ranges:
            return
        env, row = np.divmod(place, self.length)

        def free() -> bool:
            return not any(((row - first[env]) % self.length < count[env]).any() for first, count in self._ranges)

        with self._released:
            self._released.wait_for(free)


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
