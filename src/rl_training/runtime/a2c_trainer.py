"""A2C, assembled: an actor-critic for the spaces at hand, run on-policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.a2c import A2C, A2CHyperparameters
from rl_training.config import TrainConfig
from rl_training.models.actor_critic import ActorCritic
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.run import TrainResult
from rl_training.runtime.setup import Recipe
from rl_training.types import Spaces


def build_a2c(spaces: Spaces, hp: A2CHyperparameters, *, rng: np.random.Generator, device: torch.device) -> A2C:
    model = ActorCritic(spaces, hidden_sizes=hp.hidden_sizes, activation=hp.activation, log_std_init=hp.log_std_init)
    return A2C(model, hp, rng=rng, device=device)


A2C_RECIPE = Recipe("advantage actor-critic, n-step, synchronous (Mnih et al., 2016)", A2CHyperparameters, build_a2c)


def train_a2c(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_on_policy(config, A2C_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
