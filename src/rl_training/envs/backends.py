"""The ways to step N environments, all under one contract: the true successor, then the observation to go on from."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_training.config import InputError
from rl_training.data.state_check import StateMismatch, compare_state
from rl_training.envs.checks import EnvironmentFault, raised, reset_problem
from rl_training.envs.episodes import num_players_of
from rl_training.envs.spaces import ObservationLayout, any_true, copied, put_rows, same_row
from rl_training.envs.workers import Workers
from rl_training.types import Array, Observation, State


class EnvStep(NamedTuple):
    """One step of N environments; the arrays stay valid until the step after the next."""

    obs: Observation  # the start of the next step, after a reset where one happened
    reward: Array  # [N] float32
    terminated: Array  # [N] bool
    truncated: Array  # [N] bool
    next_obs: Observation  # the true successor, before any reset; the same object as obs where they do not differ
    first: Array  # [N] bool: obs begins an episode
    episode_over: Array  # [N] bool: the whole game is over, which a lost life is not
    live: Array | None  # [N] bool: False where the step was spent on a reset and is no transition; None: all are live


class Envs(ABC):
    """N environments with one observation and action space, which start new episodes by themselves."""

    env_id: str = ""
    num_envs: int
    layout: ObservationLayout  # from the environment's own observations to arrays [N, ...]
    single_observation_space: gym.Space  # as the model sees it: see spaces.model_space
    single_action_space: gym.Space  # the environment's own
    obs: Observation  # the observation that starts the next step
    frame_stack: int = 1  # an observation's first axis holds so many of the newest frames
    num_players: int = 1  # 2: both sides of a game are played here, in turns; see EnvRunner

    @abstractmethod
    def reset(self) -> Observation: ...

    @abstractmethod
    def step(self, action: Array) -> EnvStep: ...

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def load_state(self, state: State) -> list[int]:
        """Continue from a state; gives the environments that could not be brought back and begin a new episode."""

    def close(self) -> None:
        return None


class SyncEnvs(Envs):
    """Gymnasium environments (each under `Episodes`) one after the other, in this process.

    About as fast as SyncVectorEnv, but spends no step on a reset. Rows are written once, into buffers that take turns.
    """

    def __init__(self, make: Sequence[Callable[[], gym.Env]]) -> None:
        self.envs = [make_one() for make_one in make]
        self.num_envs = len(self.envs)
        self.layout = ObservationLayout(self.envs[0].observation_space)
        self.single_observation_space = self.layout.space
        self.single_action_space = self.envs[0].action_space
        self.num_players = num_players_of(self.envs[0])
        self._buffers = [self._new_buffers(), self._new_buffers()]
        self.obs = self._buffers[0][0]

    def _new_buffers(self) -> tuple[Observation, Array, Array, Array]:
        n = self.num_envs
        return self.layout.empty(n), np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool)

    def reset(self) -> Observation:
        self.obs = self._buffers[0][0]
        for index in range(self.num_envs):
            self._reset_one(index, self._write_to(self.obs))
        return self.obs

    def _reset_one(self, index: int, write: Callable[[int, Any], None]) -> None:
        obs, _ = self.envs[index].reset()  # an error in here names the environment
        try:
            write(index, obs)
        except Exception as error:
            raise raised(f"environment {self.env_id!r}, number {index}", "reset()", error) from error

    def step(self, action: Array) -> EnvStep:
        self._buffers.reverse()
        obs, reward, terminated, truncated = self._buffers[0]
        write = self._write_to(obs)
        ended: list[tuple[int, bool]] = []
        index = 0
        try:
            for index, env in enumerate(self.envs):
                row, reward[index], term, trunc, info = env.step(action[index])
                write(index, row)
                terminated[index] = term
                truncated[index] = trunc
                if term or trunc:
                    ended.append((index, info.get("episode_over", True)))
        except InputError:  # `Episodes` name themselves
            raise
        except Exception as error:  # what they do not check at every step: a shape, or a reward that is no number
            raise raised(f"environment {self.env_id!r}, number {index}", "step()", error) from error
        first = terminated | truncated
        next_obs, episode_over = obs, first
        if ended:
            next_obs, episode_over = copied(obs), first.copy()
            for index, over in ended:
                self._reset_one(index, write)
                episode_over[index] = over
        self.obs = obs
        return EnvStep(obs, reward, terminated, truncated, next_obs, first, episode_over, None)

    def _write_to(self, obs: Observation) -> Callable[[int, Any], None]:
        if self.layout.plain and isinstance(obs, np.ndarray):
            return obs.__setitem__
        return lambda index, row: self.layout.write(obs, index, row)

    def state(self) -> State:
        return {
            "kind": "episodes",
            "obs": copied(self.obs),
            "episodes": [env.get_wrapper_attr("state")() for env in self.envs],
        }

    def load_state(self, state: State) -> list[int]:
        states = check_state(state, "episodes", self)
        restored = [env.get_wrapper_attr("restore")(states) for env in self.envs]
        self.obs = self._buffers[0][0]
        lost = write_restored(self.layout, self.obs, restored, state["obs"])
        for index in lost:
            self.layout.write(self.obs, index, self.envs[index].reset()[0])
        return lost

    def close(self) -> None:
        for env in self.envs:
            env.close()


EPISODE: State = {"seed": int, "episode": int, "actions": np.ndarray | None}  # what `Episodes.state` gives


def check_state(state: State, kind: str, envs: Envs, **more: Any) -> list[State]:
    """The episodes of a saved state, which must come from the same kind and number of environments; `more`: what the
    state holds beyond that, see compare_state."""
    saved, episodes = state.get("kind"), state.get("episodes")
    count = len(episodes) if isinstance(episodes, list) else 0
    if saved != kind or (kind == "episodes" and count != envs.num_envs):
        raise InputError(
            f"the saved environments ({count or ''} {saved!r}) do not fit these ({envs.num_envs} {kind!r}): "
            "resume with the backend and num_envs the run was started with"
        )
    compare_state({"kind": str, "obs": envs.obs, "episodes": [EPISODE] * count, **more}, state, "envs")
    return list(state["episodes"])


def write_restored(
    layout: ObservationLayout, obs: Observation, restored: Sequence[Any], saved: Observation
) -> list[int]:
    """Write what replaying gave into obs; gives the environments where it is not what was saved."""
    lost = []
    for index, row in enumerate(restored):
        if row is not None:
            layout.write(obs, index, row)
        if row is None or not same_row(obs, saved, index):
            lost.append(index)
    return lost


class LifeCounter:
    """Ends the learner's episode where a life is lost; the game goes on (baselines' EpisodicLife, for batches).

    The vector emulators' own episodic life will not do: ale_py's resets the whole game, so that only the first life is
    ever played.
    """

    def __init__(self, num_envs: int) -> None:
        self.lives = np.zeros(num_envs, np.int64)

    def lost(self, lives: Array, over: Array) -> Array:
        """Which environments lost a life and play on, given the lives left [N] and the games over [N]."""
        # Some games show zero lives for a few frames before they are over; the true end follows.
        lost: Array = (lives > 0) & (lives < self.lives) & ~over
        self.lives = np.array(lives, np.int64)
        return lost


class VectorEnvs(Envs):
    """Any Gymnasium VectorEnv, whatever its autoreset mode.

    seeds gives what the n-th `reset` is seeded with; `Episodes` as sub-environments have their own. restore says how
    the state can be saved: by those `Episodes`, by the environment's plain attributes, or not at all.
    """

    def __init__(
        self,
        env: VectorEnv,
        *,
        seeds: Callable[[int], Any] | None = None,
        restore: Literal["episodes", "attributes", "none"] = "none",
        episodic_life: bool = False,
        single_frame: bool = False,
    ) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        space = env.single_observation_space
        self._single_frame = single_frame  # drop the axis of a frame stack that is one frame deep
        self.layout = ObservationLayout(_without_first_axis(space) if single_frame else space)
        self.single_observation_space = self.layout.space
        self.single_action_space = env.single_action_space
        called = restore == "episodes"  # they may be in other processes
        self.num_players = env.call("num_players")[0] if called else num_players_of(env)  # type: ignore[attr-defined]
        self._seeds = seeds
        self._starts = self._steps = 0
        self._restore = restore
        self._lives = LifeCounter(self.num_envs) if episodic_life else None
        self._waiting = np.zeros(self.num_envs, bool)  # NEXT_STEP: ended, so that the next step only resets

    def reset(self) -> Observation:
        obs, infos = self._reset(seed=self._seeds(self._starts) if self._seeds else None)
        self._starts += 1
        self._waiting = np.zeros(self.num_envs, bool)
        if self._lives:
            self._lives.lives = np.array(infos["lives"], np.int64)
        self.obs = self._batch(obs)
        return self.obs

    def _reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        try:
            result = self.env.reset(**how)
        except InputError:  # `Episodes` name themselves
            raise
        except Exception as error:
            raise raised(self._where(), "reset()", error) from error
        if problem := reset_problem(result):
            raise EnvironmentFault(f"{self._where()}: {problem}")
        return result

    def _where(self) -> str:
        return f"environment {self.env_id!r}, vectorised, at step {self._steps}"

    def _batch(self, obs: Any) -> Observation:
        return self.layout.batch(obs[:, 0] if self._single_frame else obs)

    def step(self, action: Array) -> EnvStep:
        self._steps += 1
        try:
            raw_obs, reward, terminated, truncated, infos = self.env.step(action)
            obs, reward = self._batch(raw_obs), np.asarray(reward, np.float32)
        except InputError:
            raise
        except Exception as error:
            raise raised(self._where(), "step()", error) from error
        done = terminated | truncated
        if self.mode is AutoresetMode.NEXT_STEP:
            result = self._next_step(obs, reward, terminated, truncated, done)
        elif self.mode is AutoresetMode.SAME_STEP:
            result = self._same_step(obs, reward, terminated, truncated, done, infos)
        else:
            result = self._manual(obs, reward, terminated, truncated, done)
        if self._lives:
            lost = self._lives.lost(infos["lives"], done)
            result = result._replace(terminated=terminated | lost, first=result.first | lost)
        self.obs = result.obs
        return result

    def _next_step(self, obs: Observation, reward: Array, terminated: Array, truncated: Array, done: Array) -> EnvStep:
        waited, self._waiting = self._waiting, done
        live = ~waited if any_true(waited) else None
        return EnvStep(obs, reward, terminated, truncated, obs, waited, done, live)

    def _same_step(
        self, obs: Observation, reward: Array, terminated: Array, truncated: Array, done: Array, infos: dict[str, Any]
    ) -> EnvStep:
        next_obs, over = obs, done
        if any_true(done):
            next_obs, final = copied(obs), infos["final_obs"]
            for index in np.flatnonzero(done).tolist():
                self.layout.write(next_obs, index, final[index][0] if self._single_frame else final[index])
            final_info = infos.get("final_info", {})
            if "_episode_over" in final_info:
                over = done & ~(final_info["_episode_over"] & ~final_info["episode_over"])
        return EnvStep(obs, reward, terminated, truncated, next_obs, done, over, None)

    def _manual(self, obs: Observation, reward: Array, terminated: Array, truncated: Array, done: Array) -> EnvStep:
        next_obs = obs
        if any_true(done):
            obs = copied(obs)
            put_rows(obs, done, self._batch(self._reset(options={"reset_mask": done.copy()})[0]))
        return EnvStep(obs, reward, terminated, truncated, next_obs, done, done, None)

    def state(self) -> State:
        state: State = {"kind": self._restore, "obs": copied(self.obs), "episodes": [], "starts": self._starts}
        if self._restore == "episodes":
            state["episodes"] = list(self.env.call("state"))  # type: ignore[attr-defined]
        elif self._restore == "attributes":
            state |= {"attributes": plain_attributes(self.env), "waiting": self._waiting.copy()}
        return state

    def load_state(self, state: State) -> list[int]:
        saved = {"attributes": dict | None, "waiting": self._waiting} if self._restore == "attributes" else {}
        states = check_state(state, self._restore, self, starts=int, **saved)
        self._starts = int(state["starts"])
        if self._restore == "episodes":
            return self._load_episodes(states, state["obs"])
        self.reset()
        if state.get("attributes") is None:
            return list(range(self.num_envs))
        set_plain_attributes(self.env, state["attributes"])
        self._starts = int(state["starts"])  # the reset above left no trace
        self._waiting = np.array(state["waiting"])
        self.obs = copied(state["obs"])
        return []

    def _load_episodes(self, states: list[State], saved: Observation) -> list[int]:
        obs = self.layout.empty(self.num_envs)
        restored = self.env.call("restore", states)  # type: ignore[attr-defined]
        if isinstance(self.env, Workers):
            self.env.count_from(states)
        lost = write_restored(self.layout, obs, restored, saved)
        if lost:
            mask = np.isin(np.arange(self.num_envs), lost)
            put_rows(obs, mask, self._batch(self._reset(options={"reset_mask": mask.copy()})[0]))
        self.obs = obs
        return lost

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # a process that died answers no more; the others are daemons
            self.env.close()


def _without_first_axis(space: gym.Space) -> gym.Space:
    assert isinstance(space, gym.spaces.Box)
    return gym.spaces.Box(space.low[0], space.high[0], space.shape[1:], space.dtype.type)


PLAIN = bool | int | float | str | np.generic | np.ndarray | None
CONSTANT = gym.Space | np.random.Generator | EnvSpec


def plain_attributes(env: VectorEnv) -> State | None:
    """The arrays and numbers that a vectorised environment keeps, and its generator; None if it keeps other things."""
    attributes = {key: value for key, value in vars(env.unwrapped).items() if not isinstance(value, CONSTANT)}
    attributes.pop("metadata", None)
    if not all(isinstance(value, PLAIN) for value in attributes.values()):
        return None
    values = {key: value.item() if isinstance(value, np.generic) else copy(value) for key, value in attributes.items()}
    return {"values": values, "random": env.unwrapped.np_random.bit_generator.state}


def set_plain_attributes(env: VectorEnv, state: State) -> None:
    """Continue from saved attributes; arrays must have the shapes that they have after a reset."""
    compare_state({"values": dict, "random": dict}, state, "envs.attributes")
    for name, fresh in vars(env.unwrapped).items():
        saved = state["values"].get(name)
        if isinstance(fresh, np.ndarray) and (not isinstance(saved, np.ndarray) or saved.shape != fresh.shape):
            raise StateMismatch(f"envs.attributes.values.{name} should be an array of shape {list(fresh.shape)}")
    for name, value in state["values"].items():
        setattr(env.unwrapped, name, copy(value))
    env.unwrapped.np_random.bit_generator.state = state["random"]


class EnvPoolEnvs(Envs):
    """EnvPool's own vectorised environments (Weng et al., 2022), made with `envpool.make_gymnasium`.

    Left alone, an environment that ended would spend its next step on a reset; resetting those by number saves that
    step. EnvPool takes its seed when it is made and cannot save its state.
    """

    def __init__(self, env: Any, *, num_envs: int, episodic_life: bool = False) -> None:
        self.env = env
        self.num_envs = num_envs
        self.layout = ObservationLayout(env.observation_space)
        self.single_observation_space = self.layout.space
        self.single_action_space = env.action_space
        self._lives = LifeCounter(num_envs) if episodic_life else None

    def reset(self) -> Observation:
        obs, info = self.env.reset()
        if self._lives:
            self._lives.lives = np.array(info["lives"], np.int64)
        self.obs = self.layout.batch(obs)
        return self.obs

    def step(self, action: Array) -> EnvStep:
        raw_obs, reward, terminated, truncated, info = self.env.step(action)
        obs = next_obs = self.layout.batch(raw_obs)
        terminated, truncated = terminated.astype(bool), truncated.astype(bool)
        over = first = terminated | truncated
        lives = np.array(info["lives"], np.int64) if self._lives else None
        if any_true(over):
            obs = copied(next_obs)
            ended = np.flatnonzero(over).astype(np.int32)
            reset_obs, reset_info = self.env.reset(ended)
            order = reset_info["env_id"]
            self._put(obs, order, self.layout.batch(reset_obs))
            if lives is not None:
                lives[order] = reset_info["lives"]
        if self._lives and lives is not None:
            lost = self._lives.lost(lives, over)
            terminated, first = terminated | lost, first | lost
        self.obs = obs
        return EnvStep(obs, reward.astype(np.float32), terminated, truncated, next_obs, first, over, None)

    def _put(self, obs: Observation, order: Array, rows: Observation) -> None:
        """Write rows, which are those of the environments `order`."""
        if isinstance(obs, dict):
            for key, value in obs.items():
                value[order] = rows[key]  # type: ignore[call-overload,index]
        else:
            obs[order] = rows  # type: ignore[index]

    def state(self) -> State:
        return {"kind": "none", "obs": copied(self.obs), "episodes": []}

    def load_state(self, state: State) -> list[int]:
        check_state(state, "none", self)
        self.reset()
        return list(range(self.num_envs))

    def close(self) -> None:
        self.env.close()
