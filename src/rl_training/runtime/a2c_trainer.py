"""A2C, assembled: an actor-critic for the spaces at hand, run on-policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.a2c import A2C, A2CHyperparameters
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainResult

A2C_RECIPE = Recipe(
    "a2c",
    "advantage actor-critic, n-step, synchronous (Mnih et al., 2016)",
    A2CHyperparameters,
    ActorCriticActor,
    A2C,
    actor_critic_fields,
    normalizes=("normalize_observation", "normalize_reward"),  # one gradient step per rollout: scales matter more
)


def train_a2c(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_on_policy(config, A2C_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
