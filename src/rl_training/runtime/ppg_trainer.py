"""The recipe of PPG: an actor-critic with an auxiliary value head, trained by the on-policy loop."""

from __future__ import annotations

from rl_training.acting.actor import PhasicActor
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.ppg import PPG, PPGHyperparameters
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer

PPG_RECIPE = Recipe(
    "ppg",
    "phasic policy gradient (Cobbe et al., 2020)",
    PPGHyperparameters,
    PhasicActor,
    PPG,
    actor_critic_fields,
    normalizes=("normalize_reward",),
)

train_ppg = trainer(run_on_policy, PPG_RECIPE)
