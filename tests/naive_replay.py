"""A slow replay that keeps whole observations in lists, and streams of steps to feed to it and to the real one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_training.data.batch import tree_map
from rl_training.data.fields import fields_of
from rl_training.data.replay import Replay
from rl_training.types import Array, Step

Make = Callable[[np.random.Generator, int], Any]  # (rng, a number that is its alone) -> one observation


@dataclass
class Transition:
    env: int
    obs: Any
    action: Array
    reward: float
    next_obs: Any
    terminated: bool
    truncated: bool

    @property
    def name(self) -> int:
        """Streams number their actions."""
        return int(self.action.reshape(-1)[0])


@dataclass
class NaiveReplay:
    """Rows as the ring counts them: an episode's steps, one more for its end, and before them S - 1 for its frames."""

    capacity: int
    num_envs: int
    frame_stack: int = 1
    rows: list[list[Transition | None]] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.rows = self.rows or [[] for _ in range(self.num_envs)]
        for i in np.flatnonzero(step.get("live", np.ones(self.num_envs, bool))):
            rows = self.rows[i]
            if step["first"][i] or not rows:
                if len(rows) > 1 and rows[-2] is not None and not rows[-2].terminated:
                    rows[-2].truncated = True
                rows.extend([None] * self.frame_stack)
            taken = {key: tree_map(lambda x, i=i: x[i].copy(), step[key]) for key in ("obs", "action", "next_obs")}
            flags = {key: bool(step[key][i]) for key in ("terminated", "truncated")}
            rows[-1] = Transition(env=int(i), reward=float(step["reward"][i]), **taken, **flags)
            rows.append(None)

    def drawable(self) -> list[Transition]:
        """The steps among each environment's newest rows; the last row, which no step was taken from, comes on top."""
        newest = math.ceil(self.capacity / self.num_envs)
        return [t for rows in self.rows for t in rows[-newest - 1 :] if t is not None]

    def sampled(self, start: Transition, *, gamma: float, n_step: int) -> dict[str, Any]:
        """What drawing `start` must give."""
        rows = self.rows[start.env]
        at = next(i for i, row in enumerate(rows) if row is start)
        total, last, count = 0.0, start, 0
        for t in rows[at : at + n_step]:
            if t is None:
                break
            total, last, count = total + gamma**count * t.reward, t, count + 1
            if t.terminated or t.truncated:
                break
        discount = 0.0 if last.terminated else gamma**count
        return {
            "obs": start.obs, "action": start.action, "reward": total, "discount": discount, "next_obs": last.next_obs
        }  # fmt: skip


@dataclass
class Row:
    """A step, or (`step` is false) only the observation that an episode ended with."""

    obs: Any
    columns: dict[str, Array]
    first: bool
    step: bool


@dataclass
class NaiveRows:
    """Every row of every environment, for windows: an episode of n steps is n + 1 rows, or n while it goes on."""

    capacity: int
    num_envs: int
    rows: list[list[Row]] = field(default_factory=list)
    upcoming: list[Any] = field(default_factory=list)  # the observation without a step yet; None after an episode's end

    def add(self, step: Step) -> None:
        self.rows = self.rows or [[] for _ in range(self.num_envs)]
        self.upcoming = self.upcoming or [None] * self.num_envs
        names = [key for key in step if key not in ("obs", "next_obs", "first", "live")]
        for i in np.flatnonzero(step.get("live", np.ones(self.num_envs, bool))).tolist():
            if step["first"][i] and self.upcoming[i] is not None:
                self.rows[i][-1].columns["truncated"][...] = True  # it was cut off
                self.end(i, self.upcoming[i])
            taken = {name: np.array(step[name][i]) for name in names}
            obs, next_obs = (tree_map(lambda x, i=i: x[i].copy(), step[key]) for key in ("obs", "next_obs"))
            self.rows[i].append(Row(obs, taken, first=bool(step["first"][i]), step=True))
            self.upcoming[i] = next_obs
            if step["terminated"][i] or step["truncated"][i]:
                self.end(i, next_obs)

    def end(self, i: int, obs: Any) -> None:
        zeros = {name: np.zeros_like(x) for name, x in self.rows[i][-1].columns.items()}
        self.rows[i].append(Row(obs, zeros, first=False, step=False))
        self.upcoming[i] = None

    def windows(self, length: int) -> list[tuple[int, list[Row]]]:
        """(environment, its rows) of every window that can be drawn.

        An environment's newest observation stands on top of its share of the capacity, whether a step of it is to come
        or its episode has ended. One that waits for its step is in no window.
        """
        found = []
        for i, rows in enumerate(self.rows):
            share = math.ceil(self.capacity / self.num_envs)
            known = rows[-share:] if self.upcoming[i] is not None else rows[-share - 1 :]
            found += [(i, known[at : at + length]) for at in range(len(known) - length + 1)]
        return found


def vector(rng: np.random.Generator, number: int) -> Array:
    return np.array([number, rng.standard_normal()], np.float32)


def parts(rng: np.random.Generator, number: int) -> dict[str, Array]:
    return {
        "camera": rng.integers(0, 256, (2, 3), dtype=np.uint8),
        "pose.x": rng.standard_normal(3).astype(np.float32),
        "gear": np.array(number, np.int64),
        "lit": rng.random(2) < 0.5,
    }


def frame(rng: np.random.Generator, number: int) -> Array:
    image = rng.integers(0, 256, (3, 2), dtype=np.uint8)
    image[0, 0], image[0, 1] = number % 256, number // 256 % 256
    return image


@dataclass
class Ends:
    """How likely a step ends the episode, and the step after an end is spent on a reset."""

    terminated: float = 0.12
    truncated: float = 0.12
    dead: float = 0.4
    cut: float = 0.0  # an episode is gone without an end, as after a resume


def stream(
    num_envs: int,
    *,
    seed: int = 0,
    make: Make = vector,
    frame_stack: int = 1,
    ends: Ends | None = None,
    continuous: bool = False,
) -> Iterator[Step]:
    """Endless steps; what was yielded is overwritten before the next, as a runner may do."""
    rng, ends = np.random.default_rng(seed), ends or Ends()
    envs = [_Env(rng, make, frame_stack) for _ in range(num_envs)]
    number = 0
    while True:
        number += num_envs
        for env in envs:
            env.step(ends)
        terminated, truncated = (np.array([getattr(e, key) for e in envs]) for key in ("terminated", "truncated"))
        action = np.arange(number, number + num_envs)
        step: Step = {
            "obs": _stack([env.obs for env in envs]),
            "first": np.array([env.first for env in envs]),
            "action": np.stack([action, -action], 1).astype(np.float32) if continuous else action,
            "reward": rng.standard_normal(num_envs, dtype=np.float32),
            "next_obs": _stack([env.next_obs for env in envs]),
            "terminated": terminated,
            "truncated": truncated,
            "logprob": rng.standard_normal(num_envs, dtype=np.float32),
        }
        live = np.array([env.live for env in envs])
        if not live.all():
            step["live"] = live
        yield step
        for value in step.values():
            tree_map(lambda x: x.fill(77), value)


def new_replay(
    capacity: int, num_envs: int, *, make: Make = vector, frame_stack: int = 1, continuous: bool = False, **options: Any
) -> Replay:
    """For the steps of a `stream` with these options."""
    first = next(stream(num_envs, make=make, frame_stack=frame_stack, continuous=continuous))
    return Replay(capacity, num_envs, fields_of(first), frame_stack=frame_stack, **options)


class _Env:
    """Scripted by chance. A first stack is anything: zeros, old frames of a lost life, or one frame repeated."""

    def __init__(self, rng: np.random.Generator, make: Make, frame_stack: int) -> None:
        self.rng, self.make, self.frame_stack = rng, make, frame_stack
        self.number, self.over, self.live = 0, True, True
        self.next_obs: Any = None

    def step(self, ends: Ends) -> None:
        rng, began = self.rng, self.next_obs is not None
        dead = self.live and self.over and began and rng.random() < ends.dead
        cut = self.live and not self.over and rng.random() < ends.cut
        self.live = not dead
        self.first = not dead and (self.over or cut)
        self.obs = self._begin() if self.first or self.next_obs is None else self.next_obs
        self.next_obs = self.obs if dead else self._follow()
        self.terminated, self.truncated = (
            bool(not dead and rng.random() < p) for p in (ends.terminated, ends.truncated)
        )
        if not dead:
            self.over = self.terminated or self.truncated

    def _new(self) -> Any:
        self.number += 1
        return self.make(self.rng, self.number)

    def _begin(self) -> Any:
        if self.frame_stack == 1:
            return self._new()
        newest, kind = self._new(), self.rng.integers(3)
        if kind == 0 and self.next_obs is not None:
            return self.next_obs  # a life was lost, the game goes on
        old = newest if kind == 1 else np.zeros_like(newest)
        return np.stack([old] * (self.frame_stack - 1) + [newest])

    def _follow(self) -> Any:
        return self._new() if self.frame_stack == 1 else np.concatenate([self.obs[1:], self._new()[None]])


def _stack(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)
