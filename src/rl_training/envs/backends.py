"""Other backends than SyncEnvs: vectorised environments and worker processes, all with the interface of `Envs`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_training.data.batch import any_true, arrays_of, copied, put_rows
from rl_training.data.state_check import StateMismatch, compare_state
from rl_training.envs.atari import LifeCounter
from rl_training.envs.episode_info import LOGGED, Values, batch_values, keys_of
from rl_training.envs.episodes import Envs, EnvStep, check_state, num_players_of, reset_problem, write_rows
from rl_training.envs.faults import EnvironmentFault, raised
from rl_training.envs.spaces import ObservationLayout
from rl_training.envs.workers import Workers
from rl_training.errors import InputError
from rl_training.types import Array, Observation, State


class VectorEnvs(Envs):
    """Steps a Gymnasium VectorEnv of any autoreset mode.

    `seeds` maps n to the seed of the n-th `reset`. It is None where the sub-environments are `Episodes`, which seed
    themselves. `restore` is how the state is saved: by the `Episodes`, by the plain attributes of the environment, or
    not at all.
    """

    def __init__(
        self,
        env: VectorEnv,
        *,
        seeds: Callable[[int], Any] | None = None,
        restore: Literal["episodes", "attributes", "none"] = "none",
        episodic_life: bool = False,
        single_frame: bool = False,
        log_info: Sequence[str] = (),
    ) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        space = env.single_observation_space
        self._logged = keys_of(log_info)
        self._single_frame = single_frame  # drop the frame axis, which has length 1
        self.layout = ObservationLayout(_without_first_axis(space) if single_frame else space)
        self.single_observation_space = self.layout.space
        self.single_action_space = env.single_action_space
        called = restore == "episodes"  # the sub-environments may be in other processes
        self.num_players = env.call("num_players")[0] if called else num_players_of(env)  # type: ignore[attr-defined]
        self._seeds = seeds
        self._starts = self._steps = 0
        self._restore = restore
        self._lives = LifeCounter(self.num_envs) if episodic_life else None
        self._waiting = np.zeros(self.num_envs, bool)  # [N] NEXT_STEP: the episode ended, so the next step only resets

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
        except InputError:  # from `Episodes`, which name the environment
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
        logged = self._logged_of(infos, done)
        obs, next_obs, first, over, live = self._autoreset(obs, done, infos)
        if self._lives:
            lost = self._lives.lost(infos["lives"], done)
            terminated, first = terminated | lost, first | lost
        self.obs = obs
        return EnvStep(obs, reward, terminated, truncated, next_obs, first, over, live, logged)

    def _logged_of(self, infos: dict[str, Any], done: Array) -> dict[int, Values]:
        """What is logged of the episodes that have ended. `Episodes` have chosen it themselves."""
        if not any_true(done):
            return {}
        last = infos.get("final_info", {}) if self.mode is AutoresetMode.SAME_STEP else infos
        return batch_values(last.get(LOGGED, last), np.flatnonzero(done).tolist(), self._logged, self._where())

    def _autoreset(
        self, obs: Observation, done: Array, infos: dict[str, Any]
    ) -> tuple[Observation, Observation, Array, Array, Array | None]:
        """(obs, next_obs, first, episode_over, live) of the EnvStep, by the autoreset mode."""
        if self.mode is AutoresetMode.NEXT_STEP:
            waited, self._waiting = self._waiting, done
            return obs, obs, waited, done, ~waited if any_true(waited) else None
        if not any_true(done):
            return obs, obs, done, done, None
        if self.mode is AutoresetMode.DISABLED:
            after_reset = copied(obs)
            put_rows(after_reset, done, self._batch(self._reset(options={"reset_mask": done.copy()})[0]))
            return after_reset, obs, done, done, None
        next_obs, over, final = copied(obs), done, infos["final_obs"]
        for index in np.flatnonzero(done).tolist():
            self.layout.write(next_obs, index, final[index][0] if self._single_frame else final[index])
        final_info = infos.get("final_info", {})
        if "_episode_over" in final_info:
            over = done & ~(final_info["_episode_over"] & ~final_info["episode_over"])
        return obs, next_obs, done, over, None

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
        self._starts = int(state["starts"])  # the reset above does not count
        self._waiting = np.array(state["waiting"])
        self.obs = copied(state["obs"])
        return []

    def _load_episodes(self, states: list[State], saved: Observation) -> list[int]:
        obs = self.layout.empty(self.num_envs)
        restored = self.env.call("restore", states)  # type: ignore[attr-defined]
        if isinstance(self.env, Workers):
            self.env.count_from(states)
        lost = write_rows(self.layout, obs, restored, saved)
        if lost:
            mask = np.isin(np.arange(self.num_envs), lost)
            put_rows(obs, mask, self._batch(self._reset(options={"reset_mask": mask.copy()})[0]))
        self.obs = obs
        return lost

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # a worker may be dead
            self.env.close()


def _without_first_axis(space: gym.Space) -> gym.Space:
    assert isinstance(space, gym.spaces.Box)
    return gym.spaces.Box(space.low[0], space.high[0], space.shape[1:], space.dtype.type)


PLAIN = bool | int | float | str | np.generic | np.ndarray | None
CONSTANT = gym.Space | np.random.Generator | EnvSpec


def plain_attributes(env: VectorEnv) -> State | None:
    """The attributes of a vectorised environment and its generator; None if some are neither arrays nor scalars."""
    attributes = {key: value for key, value in vars(env.unwrapped).items() if not isinstance(value, CONSTANT)}
    attributes.pop("metadata", None)
    if not all(isinstance(value, PLAIN) for value in attributes.values()):
        return None
    values = {key: value.item() if isinstance(value, np.generic) else copy(value) for key, value in attributes.items()}
    return {"values": values, "random": env.unwrapped.np_random.bit_generator.state}


def set_plain_attributes(env: VectorEnv, state: State) -> None:
    """Set saved attributes. Arrays must have the shapes that they have after a reset."""
    compare_state({"values": dict, "random": dict}, state, "envs.attributes")
    for name, fresh in vars(env.unwrapped).items():
        saved = state["values"].get(name)
        if isinstance(fresh, np.ndarray) and (not isinstance(saved, np.ndarray) or saved.shape != fresh.shape):
            raise StateMismatch(f"envs.attributes.values.{name} should be an array of shape {list(fresh.shape)}")
    for name, value in state["values"].items():
        setattr(env.unwrapped, name, copy(value))
    env.unwrapped.np_random.bit_generator.state = state["random"]


class EnvPoolEnvs(Envs):
    """Steps EnvPool environments (Weng et al., 2022), made with `envpool.make_gymnasium`.

    EnvPool by itself spends the step after an episode on a reset. Resetting those environments explicitly saves this
    step. EnvPool is seeded when it is made, and its state cannot be saved.
    """

    def __init__(self, env: Any, *, num_envs: int, episodic_life: bool = False, log_info: Sequence[str] = ()) -> None:
        self.env = env
        self._logged = keys_of(log_info)
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
        logged: dict[int, Values] = {}
        if any_true(over):
            logged = batch_values(info, np.flatnonzero(over).tolist(), self._logged, f"environment {self.env_id!r}")
            obs = copied(next_obs)
            ended = np.flatnonzero(over).astype(np.int32)
            reset_obs, reset_info = self.env.reset(ended)
            order, rows = reset_info["env_id"], arrays_of(self.layout.batch(reset_obs))
            for key, array in arrays_of(obs).items():
                array[order] = rows[key]
            if lives is not None:
                lives[order] = reset_info["lives"]
        if self._lives and lives is not None:
            lost = self._lives.lost(lives, over)
            terminated, first = terminated | lost, first | lost
        self.obs = obs
        return EnvStep(obs, reward.astype(np.float32), terminated, truncated, next_obs, first, over, None, logged)

    def state(self) -> State:
        return {"kind": "none", "obs": copied(self.obs), "episodes": []}

    def load_state(self, state: State) -> list[int]:
        check_state(state, "none", self)
        self.reset()
        return list(range(self.num_envs))

    def close(self) -> None:
        self.env.close()
