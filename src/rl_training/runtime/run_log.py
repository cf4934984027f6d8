"""The lines of a run's log: means of its updates, and the numbers of the moment."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rl_training.envs.episode_info import metric_name
from rl_training.runtime.metrics import TrainingDiverged, check_finite, over_tasks
from rl_training.runtime.outcome import last_good
from rl_training.types import Metrics

if TYPE_CHECKING:
    from rl_training.runtime.run import TrainingRun


def write_log(run: TrainingRun) -> None:
    """Write the means since the last line, and show them."""
    if run.logged == run.step:
        return
    run.logged = run.step
    means = run.means.mean()
    check_metrics(run, means)
    record = means | current(run)
    run.metrics |= record
    run.log.write(record, wall_seconds=run.wall_seconds)
    run.progress.update(run.step, run.metrics)
    note_missing_info(run, record)
    while run.source.notes:
        run.progress.message(run.source.notes.pop(0))


def note_missing_info(run: TrainingRun, record: Metrics) -> None:
    """Say once which keys of `log_info` no finished episode has had: they may be misspelt."""
    if math.isnan(record["train_return_mean"]):
        return
    for key in run.config.log_info:
        if metric_name("train", key) not in record and key not in run.noted:
            run.noted.add(key)
            run.source.notes.append(f"log_info: no episode so far had a number {key!r} in its info when it ended")


def current(run: TrainingRun) -> Metrics:
    """The metrics of this moment, without means of updates and evaluations."""
    trained = run.step - (run.resume.step if run.resume else 0)
    seconds = time.perf_counter() - run.started - run.evaluation.seconds
    return {
        "global_step": run.step,
        "gradient_steps": run.learner.gradient_steps,
        **over_tasks(run.source.recent()),
        "steps_per_second": trained / max(seconds, 1e-9),
        **run.controls.scalars_of(run.learner.hp),
    }


def check_metrics(run: TrainingRun, metrics: Metrics) -> None:
    """Raise TrainingDiverged where a number is not finite."""
    try:
        check_finite(metrics, run.step)
    except TrainingDiverged as diverged:
        remedy = f"try a lower learning rate; {last_good(run.checkpoints.wait_for_last_good())}"
        raise TrainingDiverged(diverged.step, diverged.name, diverged.value, remedy=remedy) from None
