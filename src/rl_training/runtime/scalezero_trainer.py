"""The recipe of ScaleZero: one world model for several tasks, each with its own environments and replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from rl_training.acting.planning import planning_fields
from rl_training.acting.scalezero import ScaleZeroActor
from rl_training.algorithms.scalezero import ScaleZero, ScaleZeroHyperparameters
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.multi_task import run_multi_task
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.recipe import Recipe

SCALEZERO_RECIPE = Recipe(
    "scalezero",
    "planning in several tasks with one world model that grows (Pu et al., 2025)",
    ScaleZeroHyperparameters,
    ScaleZeroActor,
    ScaleZero,
    planning_fields,
    multi_task=True,
    two_players=True,
    raw_steps=True,
    actions="Discrete",
)


def train_scalezero(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    check_evaluated(config)
    learner = partial(ScaleZero, names=[task.env_id for task in config.tasks])
    recipe = dataclasses.replace(SCALEZERO_RECIPE, learner=learner)
    return run_multi_task(config, recipe, run_suffix=run_suffix, callbacks=callbacks, **options)


def check_evaluated(config: TrainConfig) -> None:
    """Hyperparameters that use the results of evaluations need some during training."""
    wanted = [name for name in ("target_returns", "rank_exponent") if config.algo_kwargs.get(name)]
    interval = config.eval_interval
    if wanted and not 1 <= interval <= config.total_timesteps:
        message = f"uses evaluations, but with eval_interval {interval} there is none before the end: set eval_interval"
        raise ConfigError.of(message, "algo_kwargs", wanted[0])
