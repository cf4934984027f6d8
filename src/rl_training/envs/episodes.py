"""Environments that this process steps: reproducible and checked episodes, and N of them together."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from rl_training.data.batch import copied, same_row
from rl_training.data.state_check import compare_state
from rl_training.envs.episode_info import LOGGED, Values, keys_of, values_of
from rl_training.envs.faults import RESET_GIVES, EnvironmentFault, described, observation_problem, raised, step_problem
from rl_training.envs.spaces import ObservationLayout
from rl_training.errors import InputError
from rl_training.types import Array, Observation, State

MAX_ACTIONS = 200_000  # an episode with more actions is not restored: replaying it would take minutes
CHECKED_STEPS, CHECKED_RESETS = 20, 5  # fully checked at the start; later ones only by BatchChecks, which is fast


NOTHING: dict[Any, Any] = {}  # never written to; a mapping that other processes can be sent


class EnvStep(NamedTuple):
    """One step of N environments. The arrays are valid until the step after the next."""

    obs: Observation  # the observation for the next action; after a reset, the first one of the new episode
    reward: Array  # [N] float32
    terminated: Array  # [N] bool
    truncated: Array  # [N] bool
    next_obs: Observation  # the result of the action, before any reset; the same object as `obs` where no row differs
    first: Array  # [N] bool: `obs` is the first observation of an episode
    episode_over: Array  # [N] bool: the whole game is over, not only a life
    live: Array | None  # [N] bool: False where the environment only reset and ignored the action; None: all are True
    infos: Mapping[int, Values] = NOTHING  # by environment: what is logged of the episode that has just ended


class Envs(ABC):
    """N environments with the same spaces. An environment whose episode ends is reset automatically."""

    env_id: str = ""
    num_envs: int
    layout: ObservationLayout  # converts the environment's observations to the model's
    single_observation_space: gym.Space  # the model's: see `model_space`
    single_action_space: gym.Space  # the environment's
    obs: Observation  # the observation for the next action
    frame_stack: int = 1  # the number of newest frames in the first axis of an observation
    num_players: int = 1  # 2: two players act in turns; see EpisodeStatistics

    @abstractmethod
    def reset(self) -> Observation: ...

    @abstractmethod
    def step(self, action: Array) -> EnvStep: ...

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def load_state(self, state: State) -> list[int]:
        """Load a state and return the environments that could not be restored. Those begin a new episode."""

    def close(self) -> None:
        return None


class SyncEnvs(Envs):
    """Steps Gymnasium environments one after the other, in this process. Each is wrapped in `Episodes`.

    It is about as fast as SyncVectorEnv, but spends no step on a reset. Each observation is written once, into one of
    two buffers that alternate.
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
        obs, _ = self.envs[index].reset()  # `Episodes` name the environment in their errors
        try:
            write(index, obs)
        except Exception as error:
            raise raised(f"environment {self.env_id!r}, number {index}", "reset()", error) from error

    def step(self, action: Array) -> EnvStep:
        self._buffers.reverse()
        obs, reward, terminated, truncated = self._buffers[0]
        write = self._write_to(obs)
        ended: list[tuple[int, bool]] = []
        infos: dict[int, Values] = {}
        index = 0
        try:
            for index, env in enumerate(self.envs):
                row, reward[index], term, trunc, info = env.step(action[index])
                write(index, row)
                terminated[index] = term
                truncated[index] = trunc
                if term or trunc:
                    ended.append((index, info.get("episode_over", True)))
                    infos[index] = info.get(LOGGED, {})
        except InputError:  # from `Episodes`, which name the environment
            raise
        except Exception as error:  # not every step is checked there: a wrong shape, or a reward that is no number
            raise raised(f"environment {self.env_id!r}, number {index}", "step()", error) from error
        first = terminated | truncated
        next_obs, episode_over = obs, first
        if ended:
            next_obs, episode_over = copied(obs), first.copy()
            for index, over in ended:
                self._reset_one(index, write)
                episode_over[index] = over
        self.obs = obs
        return EnvStep(obs, reward, terminated, truncated, next_obs, first, episode_over, None, infos)

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
        lost = write_rows(self.layout, self.obs, restored, state["obs"])
        for index in lost:
            self.layout.write(self.obs, index, self.envs[index].reset()[0])
        return lost

    def close(self) -> None:
        for env in self.envs:
            env.close()


class Episodes(gym.Wrapper):
    """Seeds every episode, records its actions, and checks what the environment returns.

    An episode is restored by replaying its actions. This works where all randomness comes from `reset(seed=...)`.
    Of infos only what is logged is kept, at the end of an episode: a worker process would have to send them. With
    `owns_process` no other environment uses this process, so an episode seeds the global generators too.
    """

    def __init__(
        self, env: gym.Env, *, seed: int, index: int, owns_process: bool = False, log_info: Sequence[str] = ()
    ) -> None:
        super().__init__(env)
        self.seed = seed
        self.logged = keys_of(log_info)
        self.index = index
        self.owns_process = owns_process
        self.episode = -1
        self._copies = not isinstance(env.action_space, gym.spaces.Discrete)  # the caller may reuse an action array
        self.actions: list[Any] | None = []  # since the reset; None: more than MAX_ACTIONS
        self._unchecked, self._unchecked_resets = CHECKED_STEPS, CHECKED_RESETS
        space = env.observation_space
        self._shape = space.shape if isinstance(space, gym.spaces.Box) else None  # cheap to check at every step

    @property
    def num_players(self) -> int:
        return num_players_of(self.env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.seed, self.episode = seed, -1
        return self.begin(self.episode + 1, options), {}

    def begin(self, episode: int, options: dict[str, Any] | None = None) -> Any:
        """The first observation of the episode of this number."""
        self.episode, self.actions = episode, []
        seed = episode_seed(self.seed, self.index, episode)
        if self.owns_process:
            seed_process(seed)
        try:
            result = self.env.reset(seed=seed, options=options)
        except InputError:
            raise
        except Exception as error:
            raise raised(where(self), "reset()", error) from error
        problem = reset_problem(result)
        if problem is None and (self._unchecked_resets or self._other_shape(result[0])):
            self._unchecked_resets = max(0, self._unchecked_resets - 1)
            problem = observation_problem(self.observation_space, result[0])
        if problem:
            raise EnvironmentFault(f"{where(self)}: {problem}")
        return result[0]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        actions = self.actions
        if actions is not None:
            actions.append(action.copy() if self._copies else action)
            if len(actions) > MAX_ACTIONS:
                self.actions = None
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except InputError:
            raise
        except Exception as error:
            raise raised(where(self), "step()", error) from error
        problem = None
        if self._unchecked:
            self._unchecked -= 1
            problem = step_problem(reward, terminated, truncated) or observation_problem(self.observation_space, obs)
        elif self._other_shape(obs):
            problem = observation_problem(self.observation_space, obs)
        if problem:
            raise EnvironmentFault(f"{where(self)}: {problem}")
        if terminated or truncated:
            values = values_of(info, self.logged, where(self))
            return obs, reward, terminated, truncated, {LOGGED: values} if values else {}
        return obs, reward, terminated, truncated, {}

    def _other_shape(self, obs: Any) -> bool:
        """Whether the shape may differ from the space's. Such an array would be broadcast where it is stored."""
        return self._shape is not None and getattr(obs, "shape", None) != self._shape

    def state(self) -> State:
        actions = None if self.actions is None else np.asarray(self.actions)
        return {"seed": self.seed, "episode": self.episode, "actions": actions}

    def restore(self, states: list[State]) -> Any:
        """Replay this environment's saved episode and return its last observation; None where that is impossible.

        `states` has an entry for every environment, because AsyncVectorEnv sends the same arguments to all.
        """
        return replay(self, states[self.index])


def where(episodes: Episodes) -> str:
    """Which environment, and which step of it: for an error."""
    name = repr(episodes.env.spec.id) if episodes.env.spec is not None else type(episodes.unwrapped).__name__
    steps = f"{len(episodes.actions)}" if episodes.actions is not None else f"{MAX_ACTIONS} or later"
    when = "the beginning" if steps == "0" else f"step {steps}"
    return f"environment {name}, number {episodes.index}, at {when} of its episode {episodes.episode}"


def replay(episodes: Episodes, state: State) -> Any:
    episodes.seed, episodes.episode = int(state["seed"]), int(state["episode"])
    if state["actions"] is None:
        return None
    obs = episodes.begin(episodes.episode)
    actions = state["actions"]
    for number, action in enumerate(actions, 1):
        obs, _, terminated, truncated, _ = episodes.step(action)
        if (terminated or truncated) and number < len(actions):
            return None
    return obs


EPISODE: State = {"seed": int, "episode": int, "actions": np.ndarray | None}  # the pattern of `Episodes.state`


def check_state(state: State, kind: str, envs: Envs, **more: Any) -> list[State]:
    """The episodes of a saved state, after a check that it fits these environments. more: see compare_state."""
    saved, episodes = state.get("kind"), state.get("episodes")
    count = len(episodes) if isinstance(episodes, list) else 0
    if saved != kind or (kind == "episodes" and count != envs.num_envs):
        raise InputError(
            f"the saved environments ({count or ''} {saved!r}) do not fit these ({envs.num_envs} {kind!r}): "
            "resume with the backend and num_envs the run was started with"
        )
    compare_state({"kind": str, "obs": envs.obs, "episodes": [EPISODE] * count, **more}, state, "envs")
    return list(state["episodes"])


def write_rows(layout: ObservationLayout, obs: Observation, rows: Sequence[Any], saved: Observation) -> list[int]:
    """Write restored observations to `obs`. Return the environments where they are None or differ from the saved."""
    lost = []
    for index, row in enumerate(rows):
        if row is not None:
            layout.write(obs, index, row)
        if row is None or not same_row(obs, saved, index):
            lost.append(index)
    return lost


def episode_seed(seed: int, index: int, episode: int) -> int:
    """The seed of one episode of environment number `index`. It does not depend on the number of environments."""
    return int(np.random.SeedSequence((seed, index, episode)).generate_state(1)[0]) & 0x7FFFFFFF


def seed_process(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch. This package does not use them, environments may."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def num_players_of(env: Any) -> int:
    """2 where the environment declares that both players of a game act through it, else 1."""
    return 2 if getattr(env.unwrapped, "num_players", 1) == 2 else 1


def reset_problem(result: Any) -> str | None:
    """What is wrong with the return value of `reset`, its content aside; None if nothing is."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return None
    return f"{RESET_GIVES}, got {described(result)}"


class ActionRepeat(gym.Wrapper):
    """Repeats each action `times` times, or until the episode ends. The reward is the sum.

    Random exploration then reaches states that need the same action many times, and episodes have fewer steps.
    """

    def __init__(self, env: gym.Env, times: int) -> None:
        super().__init__(env)
        if num_players_of(env) == 2:
            raise InputError(
                "wrappers.action_repeat would make the moves of both players: remove it, or give a game an opponent"
            )
        self.times = times

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info
