"""The recipe of GAIL: an actor-critic whose reward is learned from demonstrations, trained by the on-policy loop."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from rl_training.acting.actor import ActorCriticActor
from rl_training.algorithms.actor_critic import actor_critic_fields
from rl_training.algorithms.gail import GAIL, GAILHyperparameters
from rl_training.config import EnvOptions, TrainConfig
from rl_training.data.demonstrations import Demonstrations
from rl_training.envs.demonstrations import load_demonstrations
from rl_training.errors import ConfigError, InputError
from rl_training.runtime.on_policy import run_on_policy
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.recipe import Recipe, trainer
from rl_training.runtime.run import TrainingRun

GAIL_RECIPE = Recipe(
    "gail",
    "imitation of demonstrations by adversarial training (Ho & Ermon, 2016)",
    GAILHyperparameters,
    ActorCriticActor,
    GAIL,
    actor_critic_fields,
)


def run_gail(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    check_reward_wrapper(config)
    learner = partial(GAIL, demonstrations=demonstrations_of(config))
    return run_on_policy(config, dataclasses.replace(recipe, learner=learner), prepare=share_normalizer, **options)


def demonstrations_of(config: TrainConfig) -> Demonstrations:
    """Read before environments are made, so that an error comes at once."""
    source = config.algo_kwargs.get("demonstrations")
    if source is None:
        message = "is missing: record an expert with `rl-training demos RUN --out FILE`, and give FILE here"
        raise ConfigError.of(message, "algo_kwargs", "demonstrations")
    try:
        return load_demonstrations(source)
    except InputError as error:
        raise ConfigError.of(str(error), "algo_kwargs", "demonstrations") from error


def check_reward_wrapper(config: TrainConfig) -> None:
    """The environment's reward is not learned from, so scaling it would do nothing."""
    if EnvOptions.of(config.env_kwargs).wrappers.normalize_reward:
        message = "has no effect: gail learns from a reward of its own, which it normalises; leave it out"
        raise ConfigError.of(message, "env_kwargs", "wrappers", "normalize_reward")


def share_normalizer(run: TrainingRun) -> None:
    """Let the learner normalise the expert's observations as the policy's are."""
    assert isinstance(run.learner, GAIL)
    (run.learner.normalizer,) = run.source.normalizers


train_gail = trainer(run_gail, GAIL_RECIPE)
