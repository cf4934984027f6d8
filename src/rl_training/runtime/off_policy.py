"""The replay loop: act once in every environment, keep it, learn from what is kept."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np

from rl_training.algorithms.base import OffPolicyAlgorithm
from rl_training.config import TrainConfig
from rl_training.envs.runner import Act
from rl_training.runtime.run import TrainingRun, TrainResult
from rl_training.runtime.setup import Recipe
from rl_training.types import Decision, Observation


def run_off_policy(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    with TrainingRun(config, recipe, prepare=keep_replay, **options) as run:
        algorithm, runner = cast(OffPolicyAlgorithm, run.algorithm), run.runner
        replay, starts = run.parts["replay"], algorithm.hp.learning_starts
        at_random = uniform_actions(runner.spaces.action)
        if starts >= config.total_timesteps:
            run.progress.message(f"nothing will be learned: learning starts at step {starts:,}, see learning_starts")
        while run.running:
            replay.add(runner.step(at_random if run.step < starts else algorithm.act))
            run.advance(runner.live_steps)
            run.record(algorithm.learn(replay))
        return run.finish()


def keep_replay(run: TrainingRun) -> None:
    replay = cast(OffPolicyAlgorithm, run.algorithm).make_replay(run.config.num_envs)
    replay.scaling = run.normalizer
    run.keep("replay", replay, in_best=False)


def uniform_actions(space: gym.Space) -> Act:
    """A policy for the time before learning starts: every action of the model's space alike."""

    def act(obs: Observation, memory: Any, *, explore: bool, rng: np.random.Generator) -> Decision:
        num_envs = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
        if isinstance(space, gym.spaces.Discrete):
            return Decision(rng.integers(space.n, size=num_envs), memory, {})
        assert isinstance(space, gym.spaces.Box)
        shape = (num_envs, *space.shape)
        return Decision(rng.uniform(space.low, space.high, shape).astype(np.float32), memory, {})

    return act
