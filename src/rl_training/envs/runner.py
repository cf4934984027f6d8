"""Steps environments: the only code that does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.config import InputError
from rl_training.data.normalize import Normalizer
from rl_training.envs.backends import Envs, EnvStep
from rl_training.envs.checks import BatchChecks, EnvironmentFault
from rl_training.envs.episodes import CHECKED_STEPS
from rl_training.envs.spaces import any_true, copied, put_rows
from rl_training.types import Array, BoxActions, Decision, Memory, Observation, Spaces, State, Step

NO_REWARD = np.zeros(0, np.float32)
RECENT = 100  # finished episodes that `recent_returns` and `recent_lengths` look back on


class Act(Protocol):
    def __call__(self, obs: Observation, memory: Memory, *, explore: bool, rng: np.random.Generator) -> Decision: ...


class FinishedEpisode(NamedTuple):
    """A whole game, in the environment's own reward; of two players, that of the one who moved first."""

    env: int
    episode_return: float
    length: int


class EnvRunner:
    """N environments and everything that is under way in them: observations, memory, randomness, episode statistics.

    box_actions says what a policy means by a Box action: "clip" (Gaussian policies) gives the environment the clipped
    action and keeps the unclipped one; "scale" (tanh policies) maps [-1, 1] to the bounds. Without `training` rewards
    stay raw and the normaliser's statistics as they are. With `raw_steps` only the policy sees normalised observations:
    a step holds what the environments gave (the reward's sign, where rewards are clipped), for a replay that
    normalises by the statistics of the day it is drawn.
    Where two players move in turns (`num_players`), the return of an episode is that of the one who moved first.
    The rows of `memory` are zero where an episode begins; it is empty before the first step.
    What the environments give is checked at every step: see EnvironmentFault.
    """

    def __init__(
        self,
        envs: Envs,
        *,
        seed: int,
        box_actions: BoxActions = "clip",
        normalizer: Normalizer | None = None,
        clip_reward: bool = False,
        training: bool = True,
        raw_steps: bool = False,
    ) -> None:
        self.envs = envs
        self.num_envs = envs.num_envs
        self.rng = np.random.default_rng(seed)
        self.normalizer = normalizer
        self.training = training
        self.raw_steps = raw_steps and normalizer is not None
        self._clip_reward = clip_reward and training
        self._to_env, self.spaces = model_side(envs, box_actions, normalizer)
        self.recent_returns: deque[float] = deque(maxlen=RECENT)
        self.recent_lengths: deque[int] = deque(maxlen=RECENT)
        self.not_restored: list[int] = []
        self._checks = BatchChecks(envs.single_observation_space, envs.num_envs)
        self._unchecked = CHECKED_STEPS  # first steps whose shapes are checked too
        self.reset()

    def reset(self) -> None:
        """Begin a new episode in every environment."""
        obs = self._raw = self.envs.reset()
        self._lengths = np.zeros(self.num_envs, np.int64)
        if problem := self._checks.shape_problem(obs):
            raise EnvironmentFault(f"environment {self.envs.env_id!r}: {problem}")
        self._check_numbers(NO_REWARD, obs, "reset")
        if self.normalizer:
            if self.training:
                self.normalizer.observe(obs)
            obs = self.normalizer.observation(obs)
        self.obs = obs
        self.first = np.ones(self.num_envs, bool)
        self.memory: Memory = {}
        self.live_steps = 0
        self.finished: list[FinishedEpisode] = []  # by the last step
        self._returns = np.zeros(self.num_envs, np.float64)

    def step(self, act: Act, *, explore: bool = True) -> Step:
        """Act once in every environment. The arrays are valid until the next call."""
        decision = act(self.obs, self.memory, explore=explore, rng=self.rng)
        result = self.envs.step(self._to_env(decision.action))
        self._check(result)
        self._count(result)
        step = {
            "obs": self._raw if self.raw_steps else self.obs,
            "first": self.first,
            "action": decision.action,
            "reward": self._learned_reward(result),
            "terminated": result.terminated,
            "truncated": result.truncated,
            **decision.extras,
        }
        self.obs, next_obs = self._learned_obs(result)
        self._raw, step["next_obs"] = result.obs, result.next_obs if self.raw_steps else next_obs
        self.first = result.first
        self.memory = {} if decision.memory is None else checked_memory(decision.memory, self.num_envs)
        if self.memory and any_true(self.first):
            self.memory = zero_rows(self.memory, self.first)
        if result.live is not None:
            step["live"] = result.live
        return step

    def _check(self, result: EnvStep) -> None:
        """An error where the environments gave what cannot be learned from."""
        if self._unchecked:
            self._unchecked -= 1
            numbers = {name: getattr(result, name) for name in ("reward", "terminated", "truncated")}
            if problem := self._checks.shape_problem(result.obs, **numbers):
                raise EnvironmentFault(f"environment {self.envs.env_id!r}: {problem}")
        self._check_numbers(result.reward, result.next_obs, "step")
        if result.obs is not result.next_obs:
            self._check_numbers(NO_REWARD, result.obs, "reset")

    def _check_numbers(self, reward: Array, obs: Observation, call: str) -> None:
        if not self._checks.passes(reward, obs):
            env, problem = self._checks.problem(reward, obs)
            when = f"step {self._lengths[env] + 1} of its episode" if call == "step" else "the beginning of an episode"
            raise EnvironmentFault(f"environment {self.envs.env_id!r}, number {env}, at {when}: {problem}")

    def _count(self, result: EnvStep) -> None:
        """Keep the books on raw rewards and whole games."""
        self.finished = []
        reward = result.reward
        if self.spaces.num_players == 2:  # who moves first gains what the other loses
            reward = np.where(self._lengths % 2, -reward, reward)
        self._returns += reward
        if result.live is None:
            self._lengths += 1
            self.live_steps = self.num_envs
        else:
            self._lengths += result.live
            self.live_steps = int(result.live.sum())
        if any_true(result.episode_over):
            for env in np.flatnonzero(result.episode_over).tolist():
                episode = FinishedEpisode(env, float(self._returns[env]), int(self._lengths[env]))
                self.finished.append(episode)
                self.recent_returns.append(episode.episode_return)
                self.recent_lengths.append(episode.length)
            self._returns[result.episode_over] = 0.0
            self._lengths[result.episode_over] = 0

    def _learned_reward(self, result: EnvStep) -> Array:
        reward = result.reward
        if self._clip_reward:
            reward = np.sign(reward)
        if self.normalizer and self.training:
            scaled = self.normalizer.reward(reward, result.terminated | result.truncated, result.live)
            return reward if self.raw_steps else scaled
        return reward

    def _learned_obs(self, result: EnvStep) -> tuple[Observation, Observation]:
        """(the observation of the next step, the successor of this one), normalised by the same statistics."""
        if self.normalizer is None:
            return result.obs, result.next_obs
        if self.training:
            # An environment that ended and waits for its reset shows its last observation once more: not counted.
            waiting = (result.terminated | result.truncated) & ~result.first
            self.normalizer.observe(result.obs, ~waiting if any_true(waiting) else None)
        obs = self.normalizer.observation(result.obs)
        return obs, obs if result.next_obs is result.obs else self.normalizer.observation(result.next_obs)

    def state_dict(self) -> State:
        """All but the normaliser, which others share."""
        return {
            "envs": self.envs.state(),
            "obs": copied(self.obs),
            "first": self.first.copy(),
            "memory": {key: value.copy() for key, value in self.memory.items()},
            "rng": self.rng.bit_generator.state,
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
        }

    def state_pattern(self) -> State:
        plain = {"envs": object, "memory": object, "recent_returns": [float], "recent_lengths": [int]}
        return {**self.state_dict(), **plain}  # the environments and the policy know what they hold

    def load_state_dict(self, state: State) -> None:
        """Load after the normaliser. `not_restored` then says which environments had to begin a new episode."""
        lost = self.not_restored = self.envs.load_state(state["envs"])
        self.obs = copied(state["obs"])
        self.first = np.array(state["first"], bool)
        self.memory = checked_memory({key: value.copy() for key, value in state["memory"].items()}, self.num_envs)
        self.rng.bit_generator.state = state["rng"]
        self._returns = np.array(state["returns"], np.float64)
        self._lengths = np.array(state["lengths"], np.int64)
        self.recent_returns = deque(state["recent_returns"], RECENT)
        self.recent_lengths = deque(state["recent_lengths"], RECENT)
        self.finished = []
        self._raw = copied(self.envs.obs)
        if lost:
            fresh = self.normalizer.observation(self.envs.obs) if self.normalizer else self.envs.obs
            put_rows(self.obs, np.array(lost), fresh)
            self.first[lost] = True
            self._returns[lost] = 0.0
            self._lengths[lost] = 0
            self.memory = zero_rows(self.memory, np.isin(np.arange(self.num_envs), lost))
            if self.normalizer and self.training:
                self.normalizer.forget(lost)

    def close(self) -> None:
        self.envs.close()


def checked_memory(memory: Any, num_envs: int) -> Memory:
    """What `act` gives to be remembered: a dict of arrays with a row for each environment, and nothing else."""
    if not isinstance(memory, dict):
        raise InputError(
            f"act returned a memory of type {type(memory).__name__}: it should be a dict of arrays [{num_envs}, ...], "
            "or empty where there is none"
        )
    for key, value in memory.items():
        if not isinstance(value, np.ndarray) or value.shape[:1] != (num_envs,):
            got = f"shape {value.shape}" if isinstance(value, np.ndarray) else f"type {type(value).__name__}"
            raise InputError(f"memory {key!r} should be an array with {num_envs} rows, one for each environment: {got}")
    return memory


def zero_rows(memory: Memory, rows: Array) -> Memory:
    """Memory with zeros in the given rows; what was handed in is left as it is."""
    zeroed = {key: value.copy() for key, value in memory.items()}
    for value in zeroed.values():
        value[rows] = 0
    return zeroed


def model_side(
    envs: Envs, box_actions: BoxActions, normalizer: Normalizer | None
) -> tuple[Callable[[Array], Array], Spaces]:
    """(from the model's actions [N, ...] to the environments', the spaces as the model sees them)."""
    to_env, action = action_map(envs.single_action_space, box_actions)
    observation = envs.single_observation_space
    seen = normalizer.space(observation) if normalizer else observation
    return to_env, Spaces(seen, action, envs.frame_stack, envs.num_players)


def action_map(space: gym.Space, box_actions: BoxActions) -> tuple[Callable[[Array], Array], gym.Space]:
    """(from the model's actions [N, ...] to the environment's, the space of the model's)."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return (lambda action: action + start) if start else np.asarray, spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        starts = space.start
        return (lambda action: action + starts) if np.any(starts) else np.asarray, spaces.MultiDiscrete(space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return lambda action: np.asarray(action).astype(np.int8), space
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return _scaled(space) if box_actions == "scale" else _clipped(space)
    raise InputError(
        f"action space {space} is not supported: use Discrete, MultiDiscrete, MultiBinary or a Box of floats; "
        "a gymnasium.ActionWrapper can turn it into one"
    )


def _clipped(space: spaces.Box) -> tuple[Callable[[Array], Array], gym.Space]:
    low, high, dtype = space.low, space.high, space.dtype

    def clip(action: Array) -> Array:
        return np.asarray(np.minimum(np.maximum(action, low), high), dtype)

    return clip, spaces.Box(low.astype(np.float32), high.astype(np.float32), space.shape, np.float32)


def _scaled(space: spaces.Box) -> tuple[Callable[[Array], Array], gym.Space]:
    low, high, dtype = space.low, space.high, space.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        half_range = 0.5 * (high - low)
    if not np.isfinite(half_range).all():  # also where bounds are finite only in name, such as the largest float32
        raise InputError(
            f"{space} is bounded by [{low.min()}, {high.max()}], but this algorithm's actions in [-1, 1] are scaled to "
            "the bounds: declare finite ones in the environment's action_space (a wrapper can), or use an algorithm "
            "with a Gaussian policy, such as ppo"
        )

    def scale(action: Array) -> Array:
        scaled = low + (action + 1.0) * half_range
        return np.asarray(np.minimum(np.maximum(scaled, low), high), dtype)  # rounding may cross a bound

    return scale, spaces.Box(-1.0, 1.0, space.shape, np.float32)
