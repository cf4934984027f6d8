"""Whole episodes on separate environments, stepped by the same code that steps training."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, pstdev

from rl_training.algorithms.base import Algorithm
from rl_training.config import InputError, TrainConfig
from rl_training.envs.factory import make_envs
from rl_training.envs.normalize import Normalizer
from rl_training.envs.runner import EnvRunner
from rl_training.runtime.randomness import seed_of, untouched_global_state
from rl_training.types import BoxActions, Metrics

MOST_ENVS = 16  # stepped side by side; more only waits for the longest episode


def evaluate(
    algorithm: Algorithm,
    config: TrainConfig,
    *,
    box_actions: BoxActions,
    normalizer: Normalizer | None = None,
    num_episodes: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Metrics | None:
    """Mean and spread of the return. All evaluations of a run have the same seeds, none of them one of training.

    None if `stopped` said so before the end.
    """
    episodes = config.eval_episodes if num_episodes is None else num_episodes
    if episodes < 1:
        raise InputError(f"num_episodes should be at least 1, got {episodes}")
    with untouched_global_state():
        returns = _returns(algorithm, config, box_actions, normalizer, episodes, stopped)
    if returns is None:
        return None
    return {
        "eval_return_mean": fmean(returns),
        "eval_return_std": pstdev(returns),
        "eval_episodes": episodes,
    }


def _returns(
    algorithm: Algorithm,
    config: TrainConfig,
    box_actions: BoxActions,
    normalizer: Normalizer | None,
    episodes: int,
    stopped: Callable[[], bool],
) -> list[float] | None:
    num_envs = min(episodes, MOST_ENVS)
    # Each environment owes a fixed number of episodes: taking the first to finish would prefer the short ones.
    owed = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
    seed = seed_of(config.seed, "evaluation")
    envs = make_envs(config.env_id, num_envs=num_envs, seed=seed, env_kwargs=config.env_kwargs, training=False)
    returns: list[float] = []
    try:
        runner = EnvRunner(envs, seed=seed, box_actions=box_actions, normalizer=normalizer, training=False)
        while any(owed):
            if stopped():
                return None
            runner.step(algorithm.act, explore=False)
            for env, episode_return, _ in runner.take_finished():
                if owed[env]:
                    owed[env] -= 1
                    returns.append(episode_return)
    finally:
        envs.close()
    return returns
