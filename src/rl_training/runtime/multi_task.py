"""The loop over several tasks: act once in each that is active, keep it in the task's replay, learn from all."""

from __future__ import annotations

from typing import Any, cast

from rl_training.algorithms.base import MultiTaskAlgorithm
from rl_training.config import TrainConfig
from rl_training.runtime.metrics import of_task
from rl_training.runtime.run import TrainingRun, TrainResult
from rl_training.runtime.setup import Recipe


def run_multi_task(config: TrainConfig, recipe: Recipe, **options: Any) -> TrainResult:
    with TrainingRun(config, recipe, prepare=prepare, **options) as run:
        algorithm = cast(MultiTaskAlgorithm, run.algorithm)
        replays = [run.parts[replay_name(task)] for task in range(len(run.players))]
        while run.running:
            active = [task for task in range(len(run.players)) if algorithm.active(task)]
            if not active:
                run.stop("every task is finished")
                break
            for task in active:
                runner = run.tasks.runners[task]
                replays[task].add(runner.step(run.players[task].act))
                run.advance(runner.live_steps)
            run.record(algorithm.learn(replays))
        return run.finish()


def prepare(run: TrainingRun) -> None:
    algorithm = cast(MultiTaskAlgorithm, run.algorithm)
    for task, runner in enumerate(run.tasks.runners):
        replay = algorithm.make_replay(run.config.num_envs, task=task)
        replay.scaling = runner.normalizer
        if run.restored_steps:
            replay.allocate(run.restored_steps[task])
        run.keep(replay_name(task), replay, in_best=False)
    if hasattr(algorithm, "note_scores"):
        run.callbacks.append(tell_scores)


def replay_name(task: int) -> str:
    return f"replay_{task}"


def tell_scores(run: TrainingRun) -> None:
    """A callback, so that a checkpoint of this step holds what the algorithm made of them."""
    if run.just_evaluated:
        names, metric = run.tasks.names, "eval_return_mean"
        keys = [of_task(metric, name) for name in names] if len(names) > 1 else [metric]
        cast(Any, run.algorithm).note_scores({task: run.metrics[key] for task, key in enumerate(keys)})
