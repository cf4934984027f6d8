"""The loop over several tasks: step each active one, store the step in the task's replay, learn from all replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from rl_training.config import TrainConfig
from rl_training.data.replay import Replay
from rl_training.runtime.metrics import of_task
from rl_training.runtime.off_policy import make_replay
from rl_training.runtime.outcome import TrainResult
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.run import TrainingRun
from rl_training.runtime.sources import SteppedSource
from rl_training.types import Reports


class MultiTaskLearner(Protocol):
    """Learns several tasks at once, identified by their numbers. Its `note_scores(dict[int, float])`, if it has one, is
    called after an evaluation with the mean return of every task."""

    def active(self, task: int) -> bool:
        """Whether the task still needs new experience."""

    def learn(self, replays: Sequence[Replay]) -> Reports:
        """Called after every step of the active tasks, with the replays of all."""


def run_multi_task(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    with TrainingRun(config, recipe, prepare=prepare, **options) as run:
        learner, tasks = cast(MultiTaskLearner, run.learner), range(len(config.tasks))
        source = cast(SteppedSource, run.source)
        replays = [run.parts[replay_name(task)] for task in tasks]
        while run.running:
            active = [task for task in tasks if learner.active(task)]
            if not active:
                run.stop("every task is finished")
                break
            run.enter("collecting")
            for task in active:
                replays[task].add(source.step(task))
                run.advance(source.env_steps)
            run.enter("learning")
            run.record(learner.learn(replays))
        return run.finish()


def prepare(run: TrainingRun) -> None:
    for task in range(len(run.config.tasks)):
        run.keep(replay_name(task), make_replay(run, task), in_best=False)
    if hasattr(run.learner, "note_scores"):
        run.callbacks.append(report_scores)


def replay_name(task: int) -> str:
    return f"replay_{task}"


def report_scores(run: TrainingRun) -> None:
    """A callback, so that a checkpoint of this step holds the learner with these scores."""
    if run.just_evaluated:
        names, metric = run.source.names, "eval_return_mean"
        keys = [of_task(metric, name) for name in names] if len(names) > 1 else [metric]
        cast(Any, run.learner).note_scores({task: run.metrics[key] for task, key in enumerate(keys)})
