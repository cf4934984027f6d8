"""What algorithms draw from a replay: transitions, sequences within an episode, and windows across episodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import to_array, tree_map
from rl_training.data.device_columns import DeviceColumns
from rl_training.data.fields import check_step
from rl_training.data.replay_saving import hold_rows, load_ring_state, ring_state
from rl_training.data.ring import Ring, draw_steps, draw_windows
from rl_training.errors import InputError
from rl_training.types import Array, Batch, Fields, History, Observation, State, Step

if TYPE_CHECKING:
    from rl_training.data.priorities import Priorities

NOT_IN_TRANSITIONS = ("first", "reward", "terminated", "truncated")
NOT_IN_SEQUENCES = ("first", "reward", "terminated")


class Scaling(Protocol):
    """Normalises by statistics that change during training. The replay stores raw values and scales what is drawn."""

    def observation(self, obs: Observation) -> Observation: ...
    def scale_reward(self, reward: Array) -> Array: ...


class Replay:
    """The newest `capacity` rows of `num_envs` environments: see `Ring`.

    Transitions are drawn uniformly, or by their priorities where the replay is `prioritized`.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        fields: Fields,
        *,
        frame_stack: int = 1,
        prioritized: bool = False,
        scaling: Scaling | None = None,
        device: torch.device | None = None,
    ) -> None:
        """fields: the entries of every step. device: holds a copy of the observations, which are then drawn from it as
        tensors. No copy is made where observations are scaled, or where the device has not enough memory."""
        self.num_envs, self.fields, self.scaling, self.device = num_envs, fields, scaling, device
        self.ring = Ring(capacity, num_envs, fields, frame_stack=frame_stack)
        self.device_columns: DeviceColumns | None = None
        self.priorities = make_priorities(len(self.ring.valid)) if prioritized else None
        self._entries: tuple[str, ...] = ()  # of the last step

    @property
    def added(self) -> int:
        """Steps ever added."""
        return self.ring.added

    @property
    def size(self) -> int:
        """Steps that can be drawn."""
        return self.ring.size

    @property
    def valid(self) -> Array:
        """[places] Whether a step that can be drawn is stored at the place."""
        return self.ring.valid

    @property
    def obs(self) -> Any:
        """[places, ...] The raw observations."""
        return self.ring.obs

    @property
    def columns(self) -> dict[str, Array]:
        """[places, ...] The other entries of the steps, by name. They are zero where a row is no step."""
        return self.ring.columns

    def add(self, step: Step) -> None:
        """Store one step of every environment, except where `live` is false."""
        if tuple(step) != self._entries:  # the first step, or one that is made in another way
            self._entries = check_step(step, self.fields, self.num_envs)
        if self.device is not None and self.ring.device is None:
            self._copy_to_device()
        place, expired = self.ring.add(step)
        if self.device_columns:
            self.device_columns.refresh(place)
        if self.priorities:
            self.priorities.add(place)
            if len(expired):
                self.priorities.remove(expired)

    def keep_on_device(self, names: Collection[str], device: torch.device) -> None:
        """Have these columns on a device: `entries` and `put` then take and give tensors there, see DeviceColumns."""
        self.device_columns = DeviceColumns({name: self.columns[name] for name in names}, device)

    def _copy_to_device(self) -> None:
        """Keep a copy of the observations on the device, unless they are scaled when drawn, or do not fit."""
        if self.device is not None and (self.scaling or not self.ring.copy_to_device(self.device)):
            self.device = None

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
        """The `transitions` [B] of the places that `draw` gives. With priorities, `weight` [B] too."""
        place, weight = self.draw(batch_size, rng, beta=beta, exponent=exponent)
        batch = self.transitions(place, gamma=gamma, n_step=n_step)
        if weight is not None:
            batch["weight"] = torch.from_numpy(weight)
        return batch

    def draw(
        self, count: int, rng: np.random.Generator, *, beta: float = 1.0, exponent: float | None = None
    ) -> tuple[Array, Array | None]:
        """(places of steps [B], importance weights [B] or None where steps are drawn uniformly)

        With priorities, P ~ priority^exponent and weight ~ P^-beta. exponent: None is the last one given.
        """
        if not self.size:
            raise ValueError("the replay is empty: add a step before drawing from it")
        if not self.priorities:
            return draw_steps(self.ring, count, rng), None
        if exponent is not None:
            self.priorities.use_exponent(exponent)
        return self.priorities.draw(count, rng, beta, self.size)

    def set_priorities(self, place: Array, priority: Array) -> None:
        """Set the priorities [B] of the steps at places [B], except of steps that can no longer be drawn."""
        assert self.priorities is not None
        valid = self.ring.valid[place]
        self.priorities.set(place[valid], priority[valid])

    def transitions(self, place: Array, *, gamma: float, n_step: int = 1) -> Batch:
        """The transitions [B] from places [B]: obs, reward, discount, next_obs, index (the places), action and extras.

        `reward` is the discounted sum of up to `n_step` rewards, fewer where the episode ends or is not known further.
        `discount` is the factor of the value of `next_obs`: gamma^steps, or 0 where the last step terminated.
        """
        reward, last, steps = self._n_step(place, gamma, n_step)
        batch = {
            "obs": self.observations(place),
            "next_obs": self.observations(self.ring.after(last, 1)),
            "reward": reward,
            "discount": np.where(self.columns["terminated"][last], 0.0, gamma**steps).astype(np.float32),
            "index": place,
        }
        for name, column in self.columns.items():
            if name not in NOT_IN_TRANSITIONS:
                batch[name] = column[place]
        return tree_map(torch.as_tensor, batch)  # type: ignore[no-any-return]

    def _n_step(self, place: Array, gamma: float, n_step: int) -> tuple[Array, Array, Array]:
        """(discounted sum of rewards [B], place of the last step [B], number of steps [B])

        The sum ends at a row that is no step: the one after an episode's last step, or after the newest step.
        """
        reward, last, steps = self._rewards(place), place, np.ones(len(place), np.int64)
        for k in range(1, n_step):
            following = self.ring.after(place, k)
            goes_on = (steps == k) & self.ring.valid[following]
            reward = reward + np.where(goes_on, np.float32(gamma**k) * self._rewards(following), np.float32(0))
            last, steps = np.where(goes_on, following, last), steps + goes_on
        return reward, last, steps

    def sequences(self, place: Array, length: int) -> dict[str, Array]:
        """The steps that follow each other in an episode, L rows from each of the places [B] on.

        place [B, L], every column [B, L, ...] but `first`. steps [B]: how many of the L rows are known steps of the
        episode, at least 1. terminated [B]: whether the last known step terminated. The rows after the known steps have
        no meaning, except that the first of them holds the observation after the last known step.
        """
        places = self.ring.after(place[:, None], np.arange(length))
        steps = np.logical_and.accumulate(self.ring.valid[places], 1).sum(1)
        last = places[np.arange(len(places)), steps - 1]
        columns = {name: column[places] for name, column in self.columns.items() if name not in NOT_IN_SEQUENCES}
        return columns | {
            "reward": self._rewards(places),
            "place": places,
            "steps": steps,
            "terminated": self.columns["terminated"][last],
        }

    def windows(self, batch_size: int, length: int, rng: np.random.Generator) -> dict[str, Any]:
        """B windows of L consecutive rows of one environment, which may cross episodes. All are equally likely.

        obs [B, L, ...], place [B, L], every column [B, L, ...]. first [B, L]: whether the row is the first of an
        episode. step [B, L]: whether the row is a step. An episode of n steps has n + 1 rows: the last holds only its
        last observation. The columns of that row are zero, or what `put` wrote.
        """
        return self.rows(draw_windows(self.ring, batch_size, length, rng))

    def rows(self, place: Array, *, without: Collection[str] = ()) -> dict[str, Any]:
        """The rows at places [...]: obs, step, place and every column but those in `without`, see `windows`."""
        columns = {name: column[place] for name, column in self.columns.items() if name not in (*without, "reward")}
        return columns | {
            "obs": self.observations(place),
            "reward": self._rewards(place),
            "step": self.ring.valid[place],
            "place": place,
        }

    def put(self, place: Array, **columns: Array | Tensor) -> None:
        """Overwrite entries [..., ...] of columns at places [...], for example latents that were recomputed.

        Waits while a checkpoint that contains these places is written. Where a place is given twice, the last entry
        counts.
        """
        for name, value in columns.items():
            if name not in self.columns:
                known = ", ".join(sorted(self.columns))
                raise InputError(f"the replay has no column {name!r} (it has {known}): declare it in extra_fields")
            expected = place.shape + self.columns[name].shape[1:]
            if np.shape(value) != expected:
                raise InputError(f"the entries of {name!r} have shape {tuple(np.shape(value))}, expected {expected}")
        if self.device_columns and columns.keys() <= self.device_columns.tensors.keys():
            self.device_columns.put(place, columns)
        else:
            self.ring.put(place, **{name: to_array(value) for name, value in columns.items()})

    def entries(self, name: str, place: Array) -> Any:
        """[..., ...] The entries of a column at places [...]: an array, or a tensor where the device has the column."""
        if self.device_columns and name in self.device_columns.tensors:
            return self.device_columns.read(name, place)
        return self.columns[name][place]

    def history(self, place: Array, count: int) -> History:
        """Up to `count` steps before the places [B], of the same episodes: see `History`.

        A place may be that of an episode's last observation. Steps that are too old to be drawn are left out.
        """
        before = self.ring.after(place[:, None], np.arange(-count, 0))
        # Between two episodes lies a row that is no step, so the steps right before the place are of its episode.
        known = np.logical_and.accumulate(self.ring.valid[before][:, ::-1], 1)[:, ::-1]
        places = np.where(known, before, place[:, None])
        return {
            "obs": self.observations(places),
            "action": self.columns["action"][places],
            "length": known.sum(1),
        }

    def age(self, place: Array) -> Array:
        """[B] About how many env steps ago the steps at places [B] were made. Rows that are no steps count too."""
        return self.ring.age(place) * self.num_envs

    def observations(self, place: Array) -> Any:
        """[..., ...] The observations at places [...]: scaled arrays, or tensors on the device."""
        obs = self.ring.observations(place.reshape(-1))
        if self.scaling and self.ring.device is None:
            obs = self.scaling.observation(obs)
        return obs if place.ndim == 1 else tree_map(lambda x: x.reshape(*place.shape, *x.shape[1:]), obs)

    def _rewards(self, place: Array) -> Array:
        """[...] The rewards at places [...], scaled."""
        reward: Array = self.columns["reward"][place]
        return self.scaling.scale_reward(reward) if self.scaling else reward

    def hold(self) -> Callable[[], None]:
        """Keep the arrays of `state_dict` unchanged until the function returned is called, from any thread."""
        self._fetch()
        return hold_rows(self.ring)

    def _fetch(self) -> None:
        if self.device_columns:
            self.device_columns.fetch(self.ring.holds)

    def state_dict(self) -> State:
        """Views of what can be drawn: see `hold`."""
        self._fetch()
        return ring_state(self.ring, self.priorities)

    def load_state_dict(self, state: State) -> None:
        """Load a state into an empty replay of the same fields, capacity and number of environments."""
        load_ring_state(self.ring, self.priorities, state)
        if self.added:
            self._copy_to_device()
            if self.device_columns:
                self.device_columns.reload()


def make_priorities(places: int) -> Priorities:
    from rl_training.data.priorities import Priorities  # numba takes longer to import than all the rest

    return Priorities(places)
