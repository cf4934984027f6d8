"""The recipe of IMPALA: an actor-critic with V-trace, trained by the on-policy loop."""

from __future__ import annotations

from rl_training.algorithms.actor_critic import versioned_fields
from rl_training.algorithms.impala import IMPALAHyperparameters, impala_actor, impala_learner
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer

IMPALA_RECIPE = Recipe(
    "impala",
    "actor-critic with V-trace, for actors that lag behind the learner (Espeholt et al., 2018)",
    IMPALAHyperparameters,
    impala_actor,
    impala_learner,
    versioned_fields,
    normalizes=("normalize_reward",),
    num_envs=16,
    asynchronous=True,
)

train_impala = trainer(run_on_policy, IMPALA_RECIPE)
