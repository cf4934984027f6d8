"""MuZero, assembled: a learned model for the spaces at hand, searched to act, run on a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.acting.planning import MuZeroActor, planning_fields
from rl_training.algorithms.muzero import MuZero, MuZeroHyperparameters
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainResult

MUZERO_RECIPE = Recipe(
    "muzero",
    "planning with a learned model (Schrittwieser et al., 2020)",
    MuZeroHyperparameters,
    MuZeroActor,
    MuZero,
    planning_fields,
    box_actions="scale",
    two_players=True,
    raw_steps=True,
    actions="Discrete, Box",
)


def train_muzero(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_off_policy(config, MUZERO_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
