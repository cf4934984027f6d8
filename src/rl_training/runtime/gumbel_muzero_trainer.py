"""The recipe of Gumbel MuZero: a learned model and a tree search, trained by the replay loop."""

from __future__ import annotations

from rl_training.acting.planning import GumbelMuZeroActor
from rl_training.algorithms.gumbel_muzero import GumbelMuZero, GumbelMuZeroHyperparameters
from rl_training.runtime.muzero_trainer import planning_recipe
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import trainer

GUMBEL_MUZERO_RECIPE = planning_recipe(
    "gumbel_muzero",
    "planning that improves the policy with few simulations (Danihelka et al., 2022)",
    GumbelMuZeroHyperparameters,
    GumbelMuZeroActor,
    GumbelMuZero,
)

train_gumbel_muzero = trainer(run_off_policy, GUMBEL_MUZERO_RECIPE)
