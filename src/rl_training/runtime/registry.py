"""The table of algorithms. A line here adds one to YAML, the command line and the contract tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rl_training.runtime.a2c_trainer import A2C_RECIPE, train_a2c
from rl_training.runtime.appo_trainer import APPO_RECIPE, train_appo
from rl_training.runtime.dqn_trainer import DQN_RECIPE, train_dqn
from rl_training.runtime.dreamer_trainer import DREAMER_RECIPE, train_dreamer
from rl_training.runtime.efficientzero_trainer import EFFICIENTZERO_RECIPE, train_efficientzero
from rl_training.runtime.gail_trainer import GAIL_RECIPE, train_gail
from rl_training.runtime.gumbel_muzero_trainer import GUMBEL_MUZERO_RECIPE, train_gumbel_muzero
from rl_training.runtime.impala_trainer import IMPALA_RECIPE, train_impala
from rl_training.runtime.muzero_trainer import MUZERO_RECIPE, train_muzero
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.ppg_trainer import PPG_RECIPE, train_ppg
from rl_training.runtime.ppo_trainer import PPO_RECIPE, train_ppo
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.recurrent_ppo_trainer import RECURRENT_PPO_RECIPE, train_recurrent_ppo
from rl_training.runtime.sac_trainer import SAC_RECIPE, train_sac
from rl_training.runtime.scalezero_trainer import SCALEZERO_RECIPE, train_scalezero
from rl_training.runtime.trpo_trainer import TRPO_RECIPE, train_trpo


class Entry(NamedTuple):
    recipe: Recipe
    train: Callable[..., TrainResult]


ALGORITHMS: dict[str, Entry] = {
    "a2c": Entry(A2C_RECIPE, train_a2c),
    "appo": Entry(APPO_RECIPE, train_appo),
    "dqn": Entry(DQN_RECIPE, train_dqn),
    "dreamer": Entry(DREAMER_RECIPE, train_dreamer),
    "efficientzero": Entry(EFFICIENTZERO_RECIPE, train_efficientzero),
    "gail": Entry(GAIL_RECIPE, train_gail),
    "gumbel_muzero": Entry(GUMBEL_MUZERO_RECIPE, train_gumbel_muzero),
    "impala": Entry(IMPALA_RECIPE, train_impala),
    "muzero": Entry(MUZERO_RECIPE, train_muzero),
    "ppg": Entry(PPG_RECIPE, train_ppg),
    "ppo": Entry(PPO_RECIPE, train_ppo),
    "recurrent_ppo": Entry(RECURRENT_PPO_RECIPE, train_recurrent_ppo),
    "sac": Entry(SAC_RECIPE, train_sac),
    "scalezero": Entry(SCALEZERO_RECIPE, train_scalezero),
    "trpo": Entry(TRPO_RECIPE, train_trpo),
}
