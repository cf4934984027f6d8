"""The recipe of DQN: a network of action values, trained by the replay loop."""

from __future__ import annotations

from rl_training.acting.actor import EpsilonGreedyActor
from rl_training.algorithms.dqn import DQN, DQNHyperparameters
from rl_training.algorithms.replay_based import replay_fields
from rl_training.runtime.off_policy import run_off_policy
from rl_training.runtime.recipe import Recipe, trainer

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

train_dqn = trainer(run_off_policy, DQN_RECIPE)
