"""Whole episodes on separate environments, stepped by the same code that steps training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import gymnasium as gym

from rl_training.acting.actor import Actor
from rl_training.config import InputError, Task, TrainConfig
from rl_training.data.normalize import Normalizer
from rl_training.envs.episodes import EnvironmentFault
from rl_training.envs.factory import make_envs, split_env_kwargs
from rl_training.envs.runner import EnvRunner
from rl_training.envs.spaces import model_side
from rl_training.runtime.metrics import of_task, over_tasks
from rl_training.runtime.randomness import own_global_state, seed_of
from rl_training.types import BoxActions, Metrics, Spaces

MOST_ENVS = 16  # stepped side by side; more only waits for the longest episode


class Player(NamedTuple):
    """An actor in one task, and what it needs to play there."""

    actor: Actor
    spaces: Spaces
    normalizer: Normalizer | None
    box_actions: BoxActions


def evaluate(
    players: Sequence[Player],
    config: TrainConfig,
    *,
    only: int | None = None,
    num_episodes: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Metrics | None:
    """Mean, spread and worst of the return, in all tasks or one; of games of two players, the share that was won. Of
    several tasks, the means; and each one's own.

    All evaluations of a run have the same seeds, none of them one of training. None if `stopped` said so before the
    end.
    """
    episodes = config.eval_episodes if num_episodes is None else num_episodes
    if episodes < 1:
        raise InputError(f"num_episodes should be at least 1, got {episodes}")
    each: dict[str, Metrics] = {}
    for number, player in enumerate(players):
        if only not in (None, number):
            continue
        with own_global_state(seed_of(config.seed, "evaluation", number)):
            returns = _returns(player, config, number, episodes, stopped)
        if returns is None:
            return None
        metrics = {
            "eval_return_mean": fmean(returns),
            "eval_return_std": pstdev(returns),
            "eval_return_min": min(returns),
        }
        if player.spaces.num_players == 2:
            metrics["eval_win_rate"] = fmean(episode_return > 0 for episode_return in returns)
        each[config.tasks[number].env_id] = metrics
    return over_tasks(each) | {"eval_episodes": episodes}


def describe_evaluation(metrics: Metrics) -> str:
    """`195.3 ± 4.1 over 10 episodes`, then the share of games won, or the means of several tasks."""
    mean, std, episodes = (metrics[f"eval_{name}"] for name in ("return_mean", "return_std", "episodes"))
    prefix = of_task("eval_return_mean", "")
    each = [f"{name.removeprefix(prefix)} {value:.1f}" for name, value in metrics.items() if name.startswith(prefix)]
    tasks = f" of each task: {', '.join(each)}" if each else ""
    won = f", {metrics['eval_win_rate']:.0%} won" if "eval_win_rate" in metrics else ""
    return f"{mean:.1f} ± {std:.1f} over {episodes:.0f} episodes{won}{tasks}"


def _returns(
    player: Player, config: TrainConfig, number: int, episodes: int, stopped: Callable[[], bool]
) -> list[float] | None:
    num_envs = min(episodes, MOST_ENVS)
    # Each environment owes a fixed number of episodes: taking the first to finish would prefer the short ones.
    owed = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
    returns: list[float] = []
    runner = _make_runner(player, config, number, num_envs)
    try:
        while any(owed):
            if stopped():
                return None
            runner.step(player.actor.act, explore=False)
            for env, episode_return, _ in runner.statistics.finished:
                if owed[env]:
                    owed[env] -= 1
                    returns.append(episode_return)
    except EnvironmentFault as fault:
        fault.args = (f"in evaluation, {fault}",)
        raise
    finally:
        runner.close()
    return returns


def _make_runner(player: Player, config: TrainConfig, number: int, num_envs: int) -> EnvRunner:
    """The environments that evaluate a task; an error where the policy would not know what it sees in them."""
    task, seed = config.tasks[number], seed_of(config.seed, "evaluation", number)
    envs = make_envs(task.env_id, num_envs=num_envs, seed=seed, env_kwargs=task.eval_env_kwargs, training=False)
    try:
        _, spaces = model_side(envs, player.box_actions, player.normalizer)
        for what in ("observation", "action"):
            here, trained = getattr(spaces, what), getattr(player.spaces, what)
            if sizes(here) != sizes(trained):
                cause = "leave what changes them out of eval_env_kwargs" if config.eval_env_kwargs else "it has changed"
                raise InputError(
                    f"{task.env_id} has {what}s {here} in evaluation, the policy was trained for {trained}: {cause}"
                )
        return EnvRunner(envs, seed=seed, box_actions=player.box_actions, normalizer=player.normalizer, training=False)
    except BaseException:
        envs.close()
        raise


def sizes(space: gym.Space) -> Any:
    """What a model must know of a space. The bounds of a Box are not among it."""
    if isinstance(space, gym.spaces.Dict):
        return {key: sizes(part) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Box):
        return (space.shape, space.dtype)
    return space


def check_evaluation(players: Sequence[Player], config: TrainConfig) -> None:
    """Where evaluation has environments of another kind than training, make one: its errors should not come late."""
    for number, task in enumerate(config.tasks):
        if task.eval_env_kwargs != task.env_kwargs:
            _check_normalizing(task)
            with own_global_state(seed_of(config.seed, "evaluation", number)):
                _make_runner(players[number], config, number, 1).close()


def _check_normalizing(task: Task) -> None:
    """Evaluation normalises as training does, by its statistics: to ask for something else would do nothing."""
    here, there = (split_env_kwargs(kwargs)[0].wrappers for kwargs in (task.env_kwargs, task.eval_env_kwargs))
    for name in ("normalize_observation", "normalize_reward"):
        if name in there.model_fields_set and bool(getattr(here, name)) != bool(getattr(there, name)):
            raise InputError(f"eval_env_kwargs.wrappers.{name}: evaluation normalises as training does, leave it out")
