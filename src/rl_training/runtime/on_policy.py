"""The on-policy loop: collect a rollout, learn from it, throw it away."""

from __future__ import annotations

from typing import Any, cast

from rl_training.algorithms.base import OnPolicyAlgorithm
from rl_training.config import TrainConfig
from rl_training.data.fields import step_fields
from rl_training.data.rollout import Rollout
from rl_training.runtime.run import TrainingRun, TrainResult
from rl_training.runtime.setup import Recipe


def run_on_policy(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    with TrainingRun(config, recipe, **options) as run:
        algorithm, runner = cast(OnPolicyAlgorithm, run.algorithm), run.runner
        fields = step_fields(runner.spaces, algorithm.extra_fields())
        rollout = Rollout(algorithm.hp.num_steps, config.num_envs, fields)
        while run.running:
            rollout.reset()
            env_steps = 0
            run.progress.phases.enter("collecting")
            while not rollout.full:
                rollout.add(runner.step(algorithm.act))
                env_steps += runner.live_steps
                run.progress.step = run.step + env_steps  # shown now; the clock of the schedules moves once, below
            run.progress.phases.enter("learning")
            run.advance(env_steps)
            run.record(algorithm.update(rollout))
        return run.finish()
