"""The recipe of DreamerV3: a world model and a policy trained in its imagination, by the replay loop."""

from __future__ import annotations

from rl_training.acting.dreamer import DreamerActor, dreamer_fields
from rl_training.algorithms.dreamer import Dreamer, DreamerHyperparameters
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe, trainer

DREAMER_RECIPE = Recipe(
    "dreamer",
    "DreamerV3: a policy trained in the imagination of a learned world model (Hafner et al., 2025)",
    DreamerHyperparameters,
    DreamerActor,
    Dreamer,
    dreamer_fields,
    raw_steps=True,
    box_actions="scale",
    actions="Discrete, MultiDiscrete, Box",
    num_envs=16,
)

train_dreamer = trainer(run_off_policy, DREAMER_RECIPE)
