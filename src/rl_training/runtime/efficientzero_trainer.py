"""EfficientZero, assembled: a learned model for the spaces at hand, searched to act, run on a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.acting.planning import EfficientZeroActor, planning_fields
from rl_training.algorithms.efficientzero import EfficientZero, EfficientZeroHyperparameters
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainResult

EFFICIENTZERO_RECIPE = Recipe(
    "efficientzero",
    "sample-efficient planning: consistency, value prefix (Ye et al., 2021)",
    EfficientZeroHyperparameters,
    EfficientZeroActor,
    EfficientZero,
    planning_fields,
    box_actions="scale",
    two_players=True,
    raw_steps=True,
    actions="Discrete, Box",
)


def train_efficientzero(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_off_policy(config, EFFICIENTZERO_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
