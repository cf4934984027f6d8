"""The recipe of EfficientZero: a learned model and a tree search, trained by the replay loop."""

from __future__ import annotations

from rl_training.acting.planning import EfficientZeroActor, planning_fields
from rl_training.algorithms.efficientzero import EfficientZero, EfficientZeroHyperparameters
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe, trainer

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

train_efficientzero = trainer(run_off_policy, EFFICIENTZERO_RECIPE)
