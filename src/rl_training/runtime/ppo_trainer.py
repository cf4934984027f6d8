"""The recipe of PPO: an actor-critic, trained by the on-policy loop."""

from __future__ import annotations

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.ppo import PPO, PPOHyperparameters
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer

PPO_RECIPE = Recipe(
    "ppo",
    "proximal policy optimization, clipped (Schulman et al., 2017)",
    PPOHyperparameters,
    ActorCriticActor,
    PPO,
    actor_critic_fields,
    normalizes=("normalize_reward",),
)

train_ppo = trainer(run_on_policy, PPO_RECIPE)
