"""The replay loop: act once in every environment, keep it, learn from what is kept."""

from __future__ import annotations

from typing import Any, cast

from rl_training.algorithms.base import OffPolicyAlgorithm
from rl_training.config import TrainConfig
from rl_training.runtime.run import TrainingRun, TrainResult
from rl_training.runtime.setup import Recipe


def run_off_policy(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    with TrainingRun(config, recipe, prepare=keep_replay, **options) as run:
        algorithm, runner = cast(OffPolicyAlgorithm, run.algorithm), run.runner
        replay, starts = run.parts["replay"], algorithm.hp.learning_starts
        if starts >= config.total_timesteps:
            run.progress.message(f"nothing will be learned: learning starts at step {starts:,}, see learning_starts")
        while run.running:
            replay.add(runner.step(algorithm.warm_up if run.step < starts else algorithm.act))
            run.advance(runner.live_steps)
            run.record(algorithm.learn(replay))
        return run.finish()


def keep_replay(run: TrainingRun) -> None:
    replay = cast(OffPolicyAlgorithm, run.algorithm).make_replay(run.config.num_envs)
    replay.scaling = run.runner.normalizer
    for step in run.restored_steps:
        replay.allocate(step)
    run.keep("replay", replay, in_best=False)
