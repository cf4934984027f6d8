"""Evaluation: whole episodes in separate environments, stepped by the same code as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple, Protocol, TypeAlias

from rl_training.acting.actor import Actor
from rl_training.config import Task, TrainConfig
from rl_training.data.normalize import Normalizer
from rl_training.envs.episodes import Envs
from rl_training.envs.factory import make_envs, split_env_kwargs
from rl_training.envs.faults import EnvironmentFault
from rl_training.envs.runner import EnvRunner, FinishedEpisode
from rl_training.envs.spaces import model_side, sizes
from rl_training.errors import InputError
from rl_training.runtime.metrics import of_task, over_tasks
from rl_training.runtime.randomness import own_global_state, seed_of
from rl_training.types import BoxActions, Metrics, Spaces

MAX_PARALLEL = 16  # environments; more would only wait for the longest episode


class Player(NamedTuple):
    """The actor of one task, with the spaces and the normaliser it was trained with."""

    actor: Actor
    spaces: Spaces
    normalizer: Normalizer | None
    box_actions: BoxActions


class Film(Protocol):
    """Shows the first environment of an evaluation, which is made with these env_kwargs."""

    env_kwargs: dict[str, Any]

    def begin(self, envs: Envs) -> None: ...
    def end(self) -> None: ...


def evaluate(
    players: Sequence[Player],
    config: TrainConfig,
    *,
    only: int | None = None,
    num_episodes: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Metrics | None:
    """Mean, standard deviation and minimum of the return, and the win rate in games of two players.

    For all tasks or one; of several tasks, the means over the tasks and the metrics of each. All evaluations of a run
    have the same seeds, which training does not use. None if `stopped` returned True before the end.
    """
    episodes = play_tasks(players, config, only=only, num_episodes=num_episodes, stopped=stopped)
    return None if episodes is None else metrics_of(episodes, players, config)


EpisodesOfTasks: TypeAlias = dict[str, list[FinishedEpisode]]  # of each task, by its env_id


def play_tasks(
    players: Sequence[Player],
    config: TrainConfig,
    *,
    only: int | None = None,
    num_episodes: int | None = None,
    explore: bool = False,
    film: Film | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> EpisodesOfTasks | None:
    """The episodes of an evaluation. explore: act as in training."""
    episodes = config.eval_episodes if num_episodes is None else num_episodes
    if episodes < 1:
        raise InputError(f"num_episodes should be at least 1, got {episodes}")
    each: EpisodesOfTasks = {}
    for number, player in enumerate(players):
        if only not in (None, number):
            continue
        with own_global_state(seed_of(config.seed, "evaluation", number)):
            played = play(player, config, number, shares(episodes), explore=explore, film=film, stopped=stopped)
        if played is None:
            return None
        each[config.tasks[number].env_id] = played
    return each


def metrics_of(episodes: EpisodesOfTasks, players: Sequence[Player], config: TrainConfig) -> Metrics:
    each: dict[str, Metrics] = {}
    for number, player in enumerate(players):
        env_id = config.tasks[number].env_id
        if env_id not in episodes:
            continue
        returns = [episode.episode_return for episode in episodes[env_id]]
        each[env_id] = {
            "eval_return_mean": fmean(returns),
            "eval_return_std": pstdev(returns),
            "eval_return_min": min(returns),
        }
        if player.spaces.num_players == 2:
            each[env_id]["eval_win_rate"] = fmean(episode_return > 0 for episode_return in returns)
    return over_tasks(each) | {"eval_episodes": len(returns)}


def describe_evaluation(metrics: Metrics) -> str:
    """`195.3 ± 4.1 over 10 episodes`, then the win rate, or the means of several tasks."""
    mean, std, episodes = (metrics[f"eval_{name}"] for name in ("return_mean", "return_std", "episodes"))
    prefix = of_task("eval_return_mean", "")
    each = [f"{name.removeprefix(prefix)} {value:.1f}" for name, value in metrics.items() if name.startswith(prefix)]
    tasks = f" of each task: {', '.join(each)}" if each else ""
    won = f", {metrics['eval_win_rate']:.0%} won" if "eval_win_rate" in metrics else ""
    return f"{mean:.1f} ± {std:.1f} over {episodes:.0f} episodes{won}{tasks}"


def play(
    player: Player,
    config: TrainConfig,
    number: int,
    remaining: list[int],
    *,
    explore: bool = False,
    film: Film | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[FinishedEpisode] | None:
    """remaining: the number of episodes that each environment is to play."""
    episodes: list[FinishedEpisode] = []
    runner = make_runner(player, config, number, len(remaining), film=film)
    try:
        while any(remaining):
            if stopped():
                return None
            runner.step(player.actor.act, explore=explore)
            for episode in runner.statistics.finished:
                if remaining[episode.env]:
                    remaining[episode.env] -= 1
                    episodes.append(episode)
            if film is not None and not remaining[0]:
                film.end()
    except EnvironmentFault as fault:
        fault.args = (f"in evaluation, {fault}",)
        raise
    finally:
        runner.close()
    return episodes


def shares(episodes: int) -> list[int]:
    """The episodes that each environment plays: taking the first to finish would prefer short ones."""
    num_envs = min(episodes, MAX_PARALLEL)
    return [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]


def make_runner(
    player: Player,
    config: TrainConfig,
    number: int,
    num_envs: int,
    *,
    stream: str = "evaluation",
    raw_steps: bool = False,
    film: Film | None = None,
) -> EnvRunner:
    """The evaluation environments of a task; an InputError if their spaces are not those of the policy."""
    task, seed = config.tasks[number], seed_of(config.seed, stream, number)
    env_kwargs = task.eval_env_kwargs if film is None else film.env_kwargs
    envs = make_envs(task.env_id, num_envs=num_envs, seed=seed, env_kwargs=env_kwargs, training=False)
    try:
        _, spaces = model_side(envs, player.box_actions, player.normalizer)
        for what in ("observation", "action"):
            found, trained = getattr(spaces, what), getattr(player.spaces, what)
            if sizes(found) != sizes(trained):
                cause = "leave what changes them out of eval_env_kwargs" if config.eval_env_kwargs else "it has changed"
                difference = f"has {what}s {found} in evaluation, the policy was trained for {trained}"
                raise InputError(f"{task.env_id} {difference}: {cause}")
        if film is not None:
            film.begin(envs)
        options: dict[str, Any] = {"box_actions": player.box_actions, "normalizer": player.normalizer}
        return EnvRunner(envs, seed=seed, **options, training=False, raw_steps=raw_steps)
    except BaseException:
        envs.close()
        raise


def check_evaluation(players: Sequence[Player], config: TrainConfig) -> None:
    """Where evaluation has its own `eval_env_kwargs`, make one environment now, so that errors come before training."""
    for number, task in enumerate(config.tasks):
        if task.eval_env_kwargs != task.env_kwargs:
            _check_normalizing(task)
            with own_global_state(seed_of(config.seed, "evaluation", number)):
                make_runner(players[number], config, number, 1).close()


def _check_normalizing(task: Task) -> None:
    """Evaluation normalises with the statistics of training: another choice would have no effect."""
    train, test = (split_env_kwargs(kwargs)[0].wrappers for kwargs in (task.env_kwargs, task.eval_env_kwargs))
    for name in ("normalize_observation", "normalize_reward"):
        if name in test.model_fields_set and bool(getattr(train, name)) != bool(getattr(test, name)):
            raise InputError(f"eval_env_kwargs.wrappers.{name}: evaluation normalises as training does, leave it out")
