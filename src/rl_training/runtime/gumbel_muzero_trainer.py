"""GumbelMuZero, assembled: a learned model for the spaces at hand, searched to act, run on a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.acting.planning import GumbelMuZeroActor, planning_fields
from rl_training.algorithms.gumbel_muzero import GumbelMuZero, GumbelMuZeroHyperparameters
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainResult

GUMBEL_MUZERO_RECIPE = Recipe(
    "gumbel_muzero",
    "planning that improves the policy with few simulations (Danihelka et al., 2022)",
    GumbelMuZeroHyperparameters,
    GumbelMuZeroActor,
    GumbelMuZero,
    planning_fields,
    box_actions="scale",
    two_players=True,
    raw_steps=True,
    actions="Discrete, Box",
)


def train_gumbel_muzero(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_off_policy(config, GUMBEL_MUZERO_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
