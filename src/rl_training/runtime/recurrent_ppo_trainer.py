"""The recipe of recurrent PPO: an actor-critic with memory, trained by the on-policy loop."""

from __future__ import annotations

from functools import partial

from rl_training.acting.recurrent import RecurrentActor
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.recurrent_ppo import RecurrentPPO, RecurrentPPOHyperparameters
from rl_training.errors import ConfigError
from rl_training.runtime.hyperparameters import is_given
from rl_training.runtime.limits import largest
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.recipe import Recipe, trainer
from rl_training.runtime.run import TrainingRun

RECURRENT_PPO_RECIPE = Recipe(
    "recurrent_ppo",
    "PPO with an LSTM or GRU, for what one observation does not show (Schulman et al., 2017)",
    RecurrentPPOHyperparameters,
    RecurrentActor,
    RecurrentPPO,
    actor_critic_fields,
    normalizes=("normalize_observation", "normalize_reward"),  # small differences between observations matter
)


def check_minibatches(run: TrainingRun) -> None:
    """A rollout is split by environments. The default adapts to fewer of them, a value that was given does not."""
    most, num_envs = largest(run.controls, "num_minibatches"), run.config.num_envs
    if is_given("num_minibatches", run.config.algo_kwargs) and most > num_envs:
        message = (
            f"reaches {most:.0f}, but a minibatch holds whole environments, and num_envs is {num_envs}: "
            "lower it or raise num_envs"
        )
        raise ConfigError.of(message, "algo_kwargs", "num_minibatches")


train_recurrent_ppo = trainer(partial(run_on_policy, prepare=check_minibatches), RECURRENT_PPO_RECIPE)
