"""The recipe of soft actor-critic: an actor and twin critics, trained by the replay loop."""

from __future__ import annotations

from rl_training.acting.actor import SquashedGaussianActor
from rl_training.algorithms.replay_based import replay_fields
from rl_training.algorithms.sac import SAC, SACHyperparameters
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe, trainer

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
    num_envs=1,  # with more, each gradient step learns from older steps: slower per env step
)

train_sac = trainer(run_off_policy, SAC_RECIPE)
