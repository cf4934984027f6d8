"""Soft actor-critic, assembled: actor and twin critics for the spaces at hand, run on a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.acting.actor import SquashedGaussianActor
from rl_training.algorithms.replay_based import replay_fields
from rl_training.algorithms.sac import SAC, SACHyperparameters
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainResult

SAC_RECIPE = Recipe(
    "sac",
    "soft actor-critic with a learned temperature (Haarnoja et al., 2018)",
    SACHyperparameters,
    SquashedGaussianActor,
    SAC,
    replay_fields,
    raw_steps=True,
    random_start=True,
    box_actions="scale",
    actions="Box",
)


def train_sac(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_off_policy(config, SAC_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
