"""The recipe of EfficientZero: a learned model and a tree search, trained by the replay loop."""

from __future__ import annotations

from rl_training.acting.planning import EfficientZeroActor
from rl_training.algorithms.efficientzero import EfficientZero, EfficientZeroHyperparameters
from rl_training.runtime.muzero_trainer import planning_recipe
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import trainer

EFFICIENTZERO_RECIPE = planning_recipe(
    "efficientzero",
    "sample-efficient planning: consistency, value prefix (Ye et al., 2021)",
    EfficientZeroHyperparameters,
    EfficientZeroActor,
    EfficientZero,
)

train_efficientzero = trainer(run_off_policy, EFFICIENTZERO_RECIPE)
