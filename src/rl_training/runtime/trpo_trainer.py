"""The recipe of TRPO: an actor-critic, trained by the on-policy loop."""

from __future__ import annotations

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.trpo import TRPO, TRPOHyperparameters
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer

TRPO_RECIPE = Recipe(
    "trpo",
    "trust region policy optimization (Schulman et al., 2015)",
    TRPOHyperparameters,
    ActorCriticActor,
    TRPO,
    actor_critic_fields,
    normalizes=("normalize_reward",),
)

train_trpo = trainer(run_on_policy, TRPO_RECIPE)
