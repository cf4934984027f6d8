"""Soft actor-critic, assembled: actor and twin critics for the spaces at hand, run on a replay."""

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
    num_envs=1,  # with more, what each gradient step learns from is older: slower per env step
)

train_sac = trainer(run_off_policy, SAC_RECIPE)
