"""DQN, assembled: a network of action values for the spaces at hand, run on a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.acting.actor import EpsilonGreedyActor
from rl_training.algorithms.dqn import DQN, DQNHyperparameters
from rl_training.algorithms.replay_based import replay_fields
from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainResult

DQN_RECIPE = Recipe(
    "dqn",
    "deep Q-learning; double, dueling, prioritized, n-step (Mnih et al., 2015)",
    DQNHyperparameters,
    EpsilonGreedyActor,
    DQN,
    replay_fields,
    raw_steps=True,
    random_start=True,
    actions="Discrete",
)


def train_dqn(
    config: TrainConfig, *, run_suffix: str | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> TrainResult:
    return run_off_policy(config, DQN_RECIPE, run_suffix=run_suffix, callbacks=callbacks, **options)
