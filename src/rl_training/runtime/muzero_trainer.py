"""The recipe of MuZero: a learned model and a tree search, trained by the replay loop."""

from __future__ import annotations

from functools import partial

from rl_training.acting.planning import MuZeroActor, planning_fields
from rl_training.algorithms.muzero import MuZero, MuZeroHyperparameters
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe, trainer

planning_recipe = partial(
    Recipe,
    fields=planning_fields,
    box_actions="scale",
    two_players=True,
    raw_steps=True,
    actions="Discrete, Box",
)
MUZERO_RECIPE = planning_recipe(
    "muzero",
    "planning with a learned model (Schrittwieser et al., 2020)",
    MuZeroHyperparameters,
    MuZeroActor,
    MuZero,
)

train_muzero = trainer(run_off_policy, MUZERO_RECIPE)
