"""The on-policy loop: collect a rollout, learn from it, throw it away."""

from __future__ import annotations

from typing import Any, cast

from rl_training.algorithms.actor_critic import ActorCriticLearner
from rl_training.config import TrainConfig
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainingRun


def run_on_policy(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    with TrainingRun(config, recipe, **options) as run:
        learner, source = cast(ActorCriticLearner, run.learner), run.source
        while run.running:
            run.enter("collecting")
            rollout = source.collect(run.show_steps)
            run.enter("learning")
            run.advance(source.env_steps)
            run.record(learner.update(rollout))
        return run.finish()
