"""Experience kept for long: one ring of rows per environment, from which transitions are drawn.

An episode of L steps takes L + 1 rows: one per step, and one for the observation it ended with. What a step led to is
therefore the observation of the next row, and every observation is stored once. Of stacked frames a row holds the
newest; the others of an episode's first stack stand in rows of their own before it, so that any padding is exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.config import InputError
from rl_training.data.batch import tree_map
from rl_training.data.fields import check_entries, check_shapes, fields_of
from rl_training.data.replay_layout import NOT_COLUMNS, ring_rows, saved_fields, stored_fields
from rl_training.data.state_check import MOST, compare_state
from rl_training.types import Array, Batch, Field, Fields, History, Observation, State, Step

if TYPE_CHECKING:
    from rl_training.data.priorities import Priorities

CURSORS = ("cursor", "under_way")


class Scaling(Protocol):
    """Statistics that change as training goes on: what is stored is raw, what is drawn is scaled by those of today."""

    def observation(self, obs: Observation) -> Observation: ...
    def scale_reward(self, reward: Array) -> Array: ...


class Replay:
    """The newest `capacity` rows of `num_envs` environments; not `prioritized`, all transitions are drawn alike.

    Arrays are [N * R, ...], the R rows of an environment one after the other; a place is an index into them. `rows` of
    each environment's can be drawn, the others leave room to write while a checkpoint is read.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        fields: Fields | None = None,
        *,
        frame_stack: int = 1,
        prioritized: bool = False,
        scaling: Scaling | None = None,
        device: torch.device | None = None,
    ) -> None:
        """fields: what every step holds; None: what the first one does. device: where observations are kept as well,
        and drawn as tensors; for each draw only indices travel there. Scaled ones are kept here alone."""
        self.fields = fields
        self._entries: tuple[str, ...] = ()  # of the last step, which were those declared
        self.num_envs, self.stack, self.scaling, self.device = num_envs, frame_stack, scaling, device
        self.rows, self.ring = ring_rows(capacity, num_envs, frame_stack)
        self.added = self.size = 0  # env steps ever seen, and transitions that can be drawn now
        self.obs: Any = None  # allocated with the first step
        self.obs_there: Any = None  # the same on the device
        self.columns: dict[str, Array] = {}  # action, reward, terminated, truncated, extras
        self.cursor = np.zeros(num_envs, np.int64)  # [N] rows ever begun; the row that the next step is written to
        self.under_way = np.zeros(num_envs, bool)  # [N] whether that row has its observation already
        places = num_envs * self.ring
        self.valid = np.zeros(places, bool)  # the transitions that can be drawn
        self.priorities = _priorities(places) if prioritized else None
        self._envs = np.arange(num_envs)
        self._held: list[Array] = []  # the cursors at the time of each checkpoint that is being written
        self._released = threading.Condition()

    def add(self, step: Step) -> None:
        """Keep one step of every environment, without the dead rows."""
        if self.fields is None:
            self.fields = fields_of(step)
        if tuple(step) != self._entries:
            check_entries(step, self.fields)
            self._entries = tuple(step)
        if self.obs is None:
            check_shapes(step, self.fields, self.num_envs)
            self._allocate(stored_fields(self.fields, self.stack))
            self._copy_there()
        env = self._envs
        if "live" in step:
            env = np.flatnonzero(step["live"])
            step = {key: tree_map(lambda x: x[env], step[key]) for key in (*self.fields, "next_obs")}
        self._begin(step, env)
        place = self._place(env)
        for name, column in self.columns.items():
            column[place] = step[name]
        self.valid[place] = True
        if self.priorities:
            self.priorities.add(place)
        self.size += len(env)
        self.added += len(env)
        self.cursor[env] += 1
        self._write_obs(env, step["next_obs"])
        ended = step["terminated"] | step["truncated"]
        if ended.any():
            self.under_way[env[ended]] = False
            self._pass(env[ended])

    def _begin(self, step: Step, env: Array) -> None:
        """Write the observation that an episode begins with; elsewhere the step before has done so."""
        under_way = self.under_way[env]
        starts = step["first"] | ~under_way
        if not starts.any():
            return
        # Under way and yet at its beginning: an environment that could not be restored left an episode open.
        cut = env[starts & under_way]
        self.columns["truncated"][self._place(cut, -1)] = True
        self._pass(cut)
        env, obs = env[starts], tree_map(lambda x: x[starts], step["obs"])
        for frame in range(self.stack - 1):
            self._write_obs(env, obs, frame)
            self._pass(env)
        self._write_obs(env, obs)
        self.under_way[env] = True

    def _pass(self, env: Array) -> None:
        """Leave the rows at the cursors without a step, and without what they held a round ago."""
        for column in self.columns.values():
            column[self._place(env)] = 0
        self.cursor[env] += 1

    def _place(self, env: Array, offset: int = 0) -> Array:
        """The places at the cursors of these environments."""
        place: Array = env * self.ring + (self.cursor[env] + offset) % self.ring
        return place

    def _write_obs(self, env: Array, obs: Observation, frame: int = -1) -> None:
        """Write observations, or a frame of each, at the cursors; what is now too old cannot be drawn any more."""
        if self._held:
            self._wait(env)
        place = self._place(env)
        if self.stack > 1:
            obs = obs[:, frame]  # type: ignore[index]
        write(self.obs, place, obs)
        if self.device is not None:
            write(self.obs_there, self._there(place), tree_map(self._there, obs))
        old = self._place(env, -self.rows - 1)
        was = self.valid[old]
        if was.any():
            self.valid[old] = False
            self.size -= int(was.sum())
            if self.priorities:
                self.priorities.remove(old[was])

    def sample(
        self,
        batch_size: int,
        rng: np.random.Generator,
        *,
        gamma: float,
        n_step: int = 1,
        beta: float = 1.0,
        exponent: float | None = None,
    ) -> Batch:
        """Transitions [B]: obs, action, reward, discount, next_obs, index, and weight where there are priorities.

        `reward` is the sum of up to n_step discounted ones, as far as the episode and what is known of it go, and
        `discount` what the value of `next_obs` counts: gamma to the number of steps, 0 where the last one terminated.
        """
        index, weight = self.draw(batch_size, rng, beta=beta, exponent=exponent)
        batch = self.transitions(index, gamma=gamma, n_step=n_step)
        if weight is not None:
            batch["weight"] = torch.from_numpy(weight)
        return batch

    def draw(
        self, count: int, rng: np.random.Generator, *, beta: float = 1.0, exponent: float | None = None
    ) -> tuple[Array, Array | None]:
        """(places of transitions [B], their importance weights [B]; None where all are equal)

        Where there are priorities, P ~ priority^exponent (None: the last one given), and weights ~ P^-beta.
        """
        if not self.size:
            raise ValueError("the replay is empty: add a step before drawing from it")
        if self.priorities:
            if exponent is not None:
                self.priorities.use_exponent(exponent)
            return self.priorities.draw(count, rng, beta, self.size)
        written = int(min(self.cursor.max() + 1, self.ring))  # rows, of the environment that has the most
        index = self._uniform(count, written, rng)
        while (wrong := np.flatnonzero(~self.valid[index])).size:
            index[wrong] = self._uniform(len(wrong), written, rng)
        return index, None

    def _uniform(self, count: int, written: int, rng: np.random.Generator) -> Array:
        draw = rng.integers(0, self.num_envs * written, count)
        return draw if written == self.ring or self.num_envs == 1 else draw // written * self.ring + draw % written

    def set_priorities(self, index: Array, priority: Array) -> None:
        """Give the transitions [B] of a batch new priorities [B]; those that have left meanwhile get none."""
        assert self.priorities is not None
        there = self.valid[index]
        self.priorities.set(index[there], priority[there])

    def transitions(self, index: Array, *, gamma: float, n_step: int = 1) -> Batch:
        """What `sample` gives, for transitions [B] of one's choice."""
        reward, last, steps = self._n_step(index, gamma, n_step)
        batch = {
            "obs": self.observations(index),
            "next_obs": self.observations(self._after(last, 1)),
            "reward": reward,
            "discount": np.where(self.columns["terminated"][last], 0.0, gamma**steps).astype(np.float32),
            "index": index,
        }
        for name in self.columns.keys() - {"reward", "terminated", "truncated"}:
            batch[name] = self.columns[name][index]
        return tree_map(torch.as_tensor, batch)  # type: ignore[no-any-return]

    def _n_step(self, index: Array, gamma: float, n_step: int) -> tuple[Array, Array, Array]:
        """(discounted reward [B], the last step's place [B], number of steps [B])

        The row after an episode's last step, like that after the newest one, is no transition: there the sum ends.
        """
        reward, last, steps = self._reward(index), index, np.ones(len(index), np.int64)
        for k in range(1, n_step):
            following = self._after(index, k)
            goes_on = (steps == k) & self.valid[following]
            reward = reward + np.where(goes_on, np.float32(gamma**k) * self._reward(following), np.float32(0))
            last, steps = np.where(goes_on, following, last), steps + goes_on
        return reward, last, steps

    def sequences(self, index: Array, length: int) -> dict[str, Array]:
        """What followed from the steps at places [B] on, in rows of `length`.

        steps [B]: how many of these are known steps of the episode, at least 1. terminated [B]: whether the last of
        those ended it. place [B, L], and all columns [B, L, ...], with rubbish beyond the known steps; but where fewer
        than L are known, the row after them holds the observation that the last one led to.
        """
        place = self._after(index[:, None], np.arange(length))
        steps = np.logical_and.accumulate(self.valid[place], 1).sum(1)
        last = place[np.arange(len(place)), steps - 1]
        columns = {name: column[place] for name, column in self.columns.items()}
        return columns | {
            "reward": self._reward(place),
            "place": place,
            "steps": steps,
            "terminated": self.columns["terminated"][last],
        }

    def history(self, index: Array, count: int) -> History:
        """Up to `count` steps of their episodes before the places [B], which may be those of last observations.

        As far as they can still be drawn; an episode's first place has none.
        """
        before = self._after(index[:, None], np.arange(-count, 0))
        known = np.logical_and.accumulate(self.valid[before][:, ::-1], 1)[:, ::-1]  # ends lie between episodes
        place = np.where(known, before, index[:, None])
        obs = self.observations(place.reshape(-1))
        return {
            "obs": tree_map(lambda x: x.reshape(*place.shape, *x.shape[1:]), obs),
            "action": self.columns["action"][place],
            "length": known.sum(1),
        }

    def age(self, index: Array) -> Array:
        """[B] How many env steps ago the steps at these places were made, about: rows of all environments alike."""
        env = index // self.ring
        age: Array = (self.cursor[env] - index % self.ring) % self.ring * self.num_envs
        return age

    def _after(self, index: Array, offset: int | Array) -> Array:
        """The places so many rows later, in the same environments' rings."""
        begin = index // self.ring * self.ring
        after: Array = begin + (index - begin + offset) % self.ring
        return after

    def _reward(self, index: Array) -> Array:
        reward: Array = self.columns["reward"][index]
        return self.scaling.scale_reward(reward) if self.scaling else reward

    def observations(self, index: Array) -> Any:
        """Those at places [B], with the frames that were stacked before them: arrays, or tensors on the device."""
        if self.stack > 1:
            index = self._after(index[:, None], np.arange(1 - self.stack, 1))
        if self.device is not None:
            there = self._there(index)
            return tree_map(lambda x: x[there], self.obs_there)
        obs: Observation = tree_map(lambda x: x[index], self.obs)
        return self.scaling.observation(obs) if self.scaling else obs

    def _copy_there(self) -> None:
        """Keep what is stored on the device as well; not where it is scaled when it is drawn, or does not fit."""
        if self.scaling:
            self.device = None
        if self.device is not None:
            try:
                self.obs_there = tree_map(self._there, self.obs)
            except torch.cuda.OutOfMemoryError:
                self.device = None

    def _there(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, copy=True)

    def _allocate(self, fields: Fields) -> None:
        self.obs = tree_map(self._empty, fields["obs"])
        self.columns = {key: self._empty(field) for key, field in fields.items() if key not in NOT_COLUMNS}

    def _empty(self, field: Field) -> Array:
        return np.zeros((self.num_envs * self.ring, *field.shape), field.dtype)

    def hold(self) -> Callable[[], None]:
        """Keep what `state_dict` gives as it is, until the function returned is called; from any thread."""
        cursor = self.cursor.copy()
        with self._released:
            self._held = [*self._held, cursor]

        def release() -> None:
            with self._released:
                self._held = [other for other in self._held if other is not cursor]
                self._released.notify_all()

        return release

    def _wait(self, env: Array) -> None:
        """Where the row at the cursor still belongs to a checkpoint that is being written, wait for that."""

        def free() -> bool:
            return not any((self.cursor[env] - self.ring >= self._oldest(held)[env]).any() for held in self._held)

        with self._released:
            self._released.wait_for(free)

    def _oldest(self, cursor: Array) -> Array:
        """[N] The oldest rows needed by what can be drawn at these cursors, stacked frames included.

        Where an episode has just ended, the last row written is the one before the cursor: hence one row more.
        """
        oldest: Array = np.maximum(0, cursor - self.rows - self.stack)
        return oldest

    def _slices(self, end: Array) -> list[slice]:
        """Where the rows lie from the oldest needed one up to `end` [N], environment by environment."""
        slices = []
        for env, (start, stop) in enumerate(zip(self._oldest(self.cursor).tolist(), end.tolist(), strict=True)):
            base, first, last = env * self.ring, start % self.ring, (stop - 1) % self.ring + 1
            if stop > start and first < last:
                slices.append(slice(base + first, base + last))
            elif stop > start:
                slices += [slice(base + first, base + self.ring), slice(base, base + last)]
        return slices

    def state_dict(self) -> State:
        """What is held, as views of the ring: see `hold`."""
        state: State = {
            "rows": self.rows,
            "added": self.added,
            "cursor": self.cursor.copy(),
            "under_way": self.under_way.copy(),
            "priorities": self.priorities.state_dict() if self.priorities else None,
        }
        if self.obs is None:
            return state
        # The row at the cursor has an observation where an episode is under way, but is no transition yet.
        seen, stepped = self._slices(self.cursor + self.under_way), self._slices(self.cursor)
        return state | {
            "obs": tree_map(lambda x: [x[part] for part in seen], self.obs),
            "columns": {key: [column[part] for part in stepped] for key, column in self.columns.items()},
            "valid": [self.valid[part].copy() for part in stepped],
        }

    def load_state_dict(self, state: State) -> None:
        """The state must hold what was declared; where nothing was, what it holds is taken as declared."""
        self._check_state(state)
        self.cursor, self.under_way = state["cursor"].copy(), state["under_way"].copy()
        self.added = state["added"]
        if "obs" not in state:
            return
        seen, stepped = self._slices(self.cursor + self.under_way), self._slices(self.cursor)
        if self.obs is None:
            self._allocate(saved_fields(state) if self.fields is None else stored_fields(self.fields, self.stack))
        fill(self.obs, state["obs"], seen, "replay.obs")
        fill(self.columns, state["columns"], stepped, "replay.columns")
        fill(self.valid, state["valid"], stepped, "replay.valid")
        self._copy_there()
        self.size = int(self.valid.sum())
        if self.priorities:
            self.priorities.load_state_dict(state["priorities"])
            if (self.priorities.priority > 0)[~self.valid].any():
                raise ValueError("replay.priorities has some of steps that cannot be drawn")

    def _check_state(self, state: State) -> None:
        expected = {"rows": int, "added": int, "cursor": np.ndarray, "under_way": np.ndarray, "priorities": object}
        content = {"obs": object, "columns": dict, "valid": list}
        compare_state(expected | (content if "obs" in state else {}), state, "replay")
        if state["rows"] != self.rows or len(state["cursor"]) != self.num_envs:
            raise InputError(
                f"the saved replay has {state['rows']:,} rows for each of {len(state['cursor'])} environments, this "
                f"one {self.rows:,} for {self.num_envs}: keep buffer_capacity and num_envs when resuming"
            )
        compare_state({"cursor": self.cursor, "under_way": self.under_way}, {k: state[k] for k in CURSORS}, "replay")
        if not 0 <= state["cursor"].min() <= state["cursor"].max() < MOST // 2:
            raise ValueError(f"replay.cursor should count rows, got {state['cursor'].tolist()}")
        if ("obs" in state) != bool(state["cursor"].any() or state["under_way"].any()):
            raise ValueError("replay.cursor and replay.obs do not agree on whether there are steps")


def write(tree: Any, place: Any, rows: Any) -> None:
    if isinstance(tree, dict):
        for key, branch in tree.items():
            write(branch, place, rows[key])
    else:
        tree[place] = rows


def fill(tree: Any, parts: Any, slices: list[slice], entry: str) -> None:
    """Write saved parts [rows, ...] to their places in arrays, nested alike."""
    if isinstance(tree, dict):
        compare_state(dict.fromkeys(tree, object), parts, entry)
        for key, branch in tree.items():
            fill(branch, parts[key], slices, f"{entry}.{key}")
    else:
        compare_state([tree[place] for place in slices], parts, entry)
        for place, rows in zip(slices, parts, strict=True):
            tree[place] = rows


def _priorities(places: int) -> Priorities:
    from rl_training.data.priorities import Priorities  # numba takes longer to import than all the rest

    return Priorities(places)
