"""The recipe of APPO: PPO with V-trace and a target network, trained by the on-policy loop."""

from __future__ import annotations

from rl_training.acting.actor import VersionedActor
from rl_training.algorithms.actor_critic import versioned_fields
from rl_training.algorithms.appo import APPO, APPOHyperparameters
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer

APPO_RECIPE = Recipe(
    "appo",
    "PPO with V-trace and a target network, for actors that lag behind the learner (after Luo et al., 2019)",
    APPOHyperparameters,
    VersionedActor,
    APPO,
    versioned_fields,
    normalizes=("normalize_reward",),
    asynchronous=True,
)

train_appo = trainer(run_on_policy, APPO_RECIPE)
