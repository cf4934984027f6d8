"""Tiny environments with known answers, and the shortest loops that learn them.

Each environment adds one difficulty to the one before: if a probe fails and its predecessor passes, that difficulty is
what is broken.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.acting.actor import VersionedActor
from rl_training.algorithms.actor_critic import actor_critic_fields, versioned_fields
from rl_training.data.rollout import Rollout
from rl_training.types import Array, Spaces, Step


class Probe(gym.Env):
    """Episodes of `length` steps that terminate; subclasses say what is seen and what is earned."""

    observation_space: gym.Space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space: gym.Space = gym.spaces.Discrete(2)
    length = 1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Array, dict]:
        super().reset(seed=seed)
        self.t = 0
        self.sign = float(self.np_random.choice([-1.0, 1.0]))
        return self.see(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict]:
        reward = self.earn(action)
        self.t += 1
        return self.see(), reward, self.t >= self.length, False, {}

    def see(self) -> Array:
        return np.zeros(1, np.float32)

    def earn(self, action: Any) -> float:
        return 1.0


class ConstantReward(Probe):
    """V = 1."""


class SeenReward(Probe):
    """V(obs) = obs."""

    def see(self) -> Array:
        return np.full(1, self.sign, np.float32)

    def earn(self, action: Any) -> float:
        return self.sign


class DelayedReward(Probe):
    """Two steps, the reward at the end: V(0) = gamma, V(1) = 1."""

    length = 2

    def see(self) -> Array:
        return np.full(1, self.t, np.float32)

    def earn(self, action: Any) -> float:
        return float(self.t == 1)


class Bandit(Probe):
    """Action 1 earns 1, action 0 earns -1."""

    def earn(self, action: Any) -> float:
        return 1.0 if action == 1 else -1.0


class SeenBandit(SeenReward):
    """The right action depends on the sign seen."""

    def earn(self, action: Any) -> float:
        return 1.0 if (action == 1) == (self.sign > 0) else -1.0


class ContinuousBandit(Probe):
    """The reward is largest at action 0.5."""

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def earn(self, action: Any) -> float:
        return -float((action[0] - 0.5) ** 2)


class Chain(Probe):
    """Reward 1 for each of five steps, at whose end the episode is terminated or truncated."""

    length = 5

    def __init__(self, truncates: bool) -> None:
        self.truncates = truncates
        size = 1 if truncates else self.length
        self.observation_space = gym.spaces.Box(0.0, 1.0, (size,), np.float32)

    def see(self) -> Array:
        """Time is only seen where it matters: an endless chain has one state."""
        return np.ones(1, np.float32) if self.truncates else np.eye(self.length + 1, dtype=np.float32)[self.t, :-1]

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict]:
        obs, reward, over, _, info = super().step(action)
        return obs, reward, over and not self.truncates, over and self.truncates, info


class ProbeRunner:
    """Steps N environments with an actor, in the terms that `Rollout` understands."""

    def __init__(self, envs: list[gym.Env], seed: int = 0) -> None:
        self.envs, self.rng = envs, np.random.default_rng(seed)
        self.spaces = Spaces(envs[0].observation_space, envs[0].action_space)
        self.obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])

    def step(self, actor: Any) -> Step:
        decision = actor.act(self.obs, {}, explore=True, rng=self.rng)
        next_obs, reward, terminated, truncated, _ = zip(
            *[env.step(action) for env, action in zip(self.envs, decision.action, strict=True)], strict=True
        )
        step = {
            "obs": self.obs,
            "action": decision.action,
            "reward": np.array(reward, np.float32),
            "next_obs": np.stack(next_obs),
            "terminated": np.array(terminated),
            "truncated": np.array(truncated),
            **decision.extras,
        }
        over = step["terminated"] | step["truncated"]
        ends = zip(self.envs, over, next_obs, strict=True)
        self.obs = np.stack([env.reset()[0] if end else obs for env, end, obs in ends])
        return step

    def train(self, learner: Any, updates: int) -> dict[str, float]:
        rollout, metrics = empty_rollout(learner, self.spaces, learner.hp.num_steps, len(self.envs)), {}
        for _ in range(updates):
            rollout.reset()
            while not rollout.full:
                rollout.add(self.step(learner.actor))
            metrics = learner.update(rollout)
        return metrics


def empty_rollout(learner: Any, spaces: Spaces, num_steps: int, num_envs: int) -> Rollout:
    versioned = isinstance(learner.actor, VersionedActor)
    fields = (versioned_fields if versioned else actor_critic_fields)(spaces, learner.hp)
    del fields["first"]  # steps are made here without it
    return Rollout(num_steps, num_envs, fields)


def random_observation(space: gym.Space, num_envs: int, rng: np.random.Generator) -> Any:
    """Observations [N, ...] of a space; normal where the space is a Box of floats."""
    if isinstance(space, gym.spaces.Dict):
        return {key: random_observation(part, num_envs, rng) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Box) and space.dtype == np.float32:
        return rng.standard_normal((num_envs, *space.shape), dtype=np.float32)
    space.seed(int(rng.integers(2**31)))
    return np.stack([space.sample() for _ in range(num_envs)])


def random_rollout(learner: Any, spaces: Spaces, *, num_steps: int, num_envs: int, seed: int = 0) -> Rollout:
    """A full rollout of random observations and rewards, acted upon by the learner's actor."""
    rng, rollout = np.random.default_rng(seed), empty_rollout(learner, spaces, num_steps, num_envs)
    while not rollout.full:
        obs = random_observation(spaces.observation, num_envs, rng)
        decision = learner.actor.act(obs, {}, explore=True, rng=rng)
        rollout.add(
            {
                "obs": obs,
                "action": decision.action,
                "reward": rng.standard_normal(num_envs, dtype=np.float32),
                "next_obs": random_observation(spaces.observation, num_envs, rng),
                "terminated": rng.random(num_envs) < 0.1,
                "truncated": rng.random(num_envs) < 0.1,
                **decision.extras,
            }
        )
    return rollout


def copy_training(source: Any, target: Any) -> None:
    """Let one learner and its actor go on where another stands, as a checkpoint does."""
    target.actor.load_state_dict(source.actor.state_dict())
    target.load_state_dict(source.state_dict())
