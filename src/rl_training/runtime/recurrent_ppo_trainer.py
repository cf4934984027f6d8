"""The recipe of recurrent PPO: an actor-critic with memory, trained by the on-policy loop."""

from __future__ import annotations

from rl_training.acting.recurrent import RecurrentActor
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.recurrent_ppo import RecurrentPPO, RecurrentPPOHyperparameters
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer

RECURRENT_PPO_RECIPE = Recipe(
    "recurrent_ppo",
    "PPO with an LSTM or GRU, for what one observation does not show (Schulman et al., 2017)",
    RecurrentPPOHyperparameters,
    RecurrentActor,
    RecurrentPPO,
    actor_critic_fields,
    normalizes=("normalize_reward",),
)

train_recurrent_ppo = trainer(run_on_policy, RECURRENT_PPO_RECIPE)
