"""PPO, assembled: an actor-critic for the spaces at hand, run on-policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.ppo import PPO, PPOHyperparameters
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainResult

PPO_RECIPE = Recipe(
    "ppo",
    "proximal policy optimization, clipped (Schulman et al., 2017)",
    PPOHyperparameters,
    ActorCriticActor,
    PPO,
    actor_critic_fields,
    normalizes=("normalize_reward",),
)


def train_ppo(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_on_policy(config, PPO_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
