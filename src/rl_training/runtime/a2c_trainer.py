"""The recipe of A2C: an actor-critic, trained by the on-policy loop."""

from __future__ import annotations

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.a2c import A2C, A2CHyperparameters
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer

A2C_RECIPE = Recipe(
    "a2c",
    "advantage actor-critic, n-step, synchronous (Mnih et al., 2016)",
    A2CHyperparameters,
    ActorCriticActor,
    A2C,
    actor_critic_fields,
    normalizes=("normalize_observation", "normalize_reward"),  # one gradient step per rollout: scales matter more
)

train_a2c = trainer(run_on_policy, A2C_RECIPE)
