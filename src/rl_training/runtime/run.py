"""A training run: everything that a loop uses besides the algorithm itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_training.config import TrainConfig
from rl_training.envs.faults import EnvironmentFault
from rl_training.errors import InputError
from rl_training.runtime.callbacks import Callback, build_callbacks, name_callbacks
from rl_training.runtime.checkpoint_format import Checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.execution import open_source
from rl_training.runtime.interrupts import Interrupts
from rl_training.runtime.metrics import RunningMeans, over_tasks
from rl_training.runtime.outcome import TrainingInterrupted, TrainResult, last_good
from rl_training.runtime.preview import schedule_warnings
from rl_training.runtime.progress import Progress, make_progress
from rl_training.runtime.randomness import own_global_state, seed_of
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.restoring import checkpoint_errors, resume_notes
from rl_training.runtime.run_checkpoints import IfMissing, RunCheckpoints, RunState
from rl_training.runtime.run_evaluations import RunEvaluations
from rl_training.runtime.run_folder import open_folder, write_status
from rl_training.runtime.run_log import check_metrics, write_log
from rl_training.runtime.setup import build_agent, has_convolutions, quick_kernels, with_env_defaults
from rl_training.types import Metrics, Reports


class TrainingRun:
    """The clock and the record of one run, and its parts: source, actor, learner, evaluations, checkpoints."""

    started: float  # when training began: see `begin`
    slow_kernels: Callable[[], None]  # undoes `quick_kernels`

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        *,
        run_suffix: str | None = None,
        callbacks: Sequence[Callback] = (),
        resume: Checkpoint | None = None,
        progress: str = "auto",
        prepare: Callable[[TrainingRun], None] = lambda run: None,
    ) -> None:
        """`prepare` adds the parts of a loop with `keep`, before anything is written."""
        if config.algo != recipe.name:
            raise InputError(f"this trains {recipe.name}, but the config says algo: {config.algo}")
        self.config = config = with_env_defaults(config, recipe)
        self.recipe, self.resume = recipe, resume
        self.controls = Controls.of(config, recipe.hyperparameters)
        self.step, self.recorded, self.logged = 0, 0, -1  # env steps: now, at the last record, at the last log line
        self.earlier_seconds = 0.0  # that the runs took which this one was resumed from
        self.metrics: Metrics = {}
        self.means = RunningMeans()
        self.noted: set[str] = set()  # keys of `log_info` that were said to be missing
        self.stop_reason: str | None = None
        self.evaluation = RunEvaluations(self)
        self.checkpoints = RunCheckpoints(self, resume)
        self.parts = self.checkpoints.parts
        self.interrupts = Interrupts(partial(interrupt, self))
        self.entered = False
        varying, automatic = tuple(self.controls.varying), self.controls.automatic
        self.progress: Progress = make_progress(progress, schedule_names=varying, auto_names=automatic)
        with contextlib.ExitStack() as undo:  # a run that cannot be made leaves the process as it was
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            undo.enter_context(own_global_state(seed_of(config.seed, "process")))
            self.source = open_source(config, recipe)
            undo.callback(self.source.close)
            self.keep("controls", self.controls, if_missing="refuse")
            self._in_force = self.controls.at(0)
            agent = build_agent(config, recipe, self.controls, self.source, resume)
            self.actor, self.learner, self.players, self.fields, self.device = agent
            keep_agent(self)
            self.callbacks = [*build_callbacks(config.callbacks), *callbacks]
            prepare(self)
            for name, callback in name_callbacks(self.callbacks).items():
                self.keep(name, callback)
            self.keep("run", RunState(self), if_missing="refuse")
            self.dir, self.log = open_folder(self, run_suffix)
            self.undo = undo.pop_all()

    @property
    def running(self) -> bool:
        return self.step < self.config.total_timesteps and self.stop_reason is None

    @property
    def wall_seconds(self) -> float:
        """How long the run has taken, with the runs that it was resumed from; the time between them does not count."""
        return self.earlier_seconds + (time.perf_counter() - self.started if self.entered else 0.0)

    @property
    def evaluations(self) -> int:
        """The number of evaluations so far, those of the runs it was resumed from included."""
        return self.evaluation.count

    @property
    def just_evaluated(self) -> bool:
        """Whether `metrics` holds an evaluation of this very step."""
        return self.evaluation.step == self.step

    def stop(self, reason: str) -> None:
        """Stop after the current record; `reason` is printed and saved."""
        self.stop_reason = self.stop_reason or reason

    def keep(self, name: str, part: Any, *, in_best: bool = True, if_missing: IfMissing = "report") -> None:
        """Make `part` belong to the run: saved with it and, when resuming, restored with it.

        A part with `hold` is written while training continues: see `Saver.save`. `if_missing`: what to do if the
        checkpoint that is resumed does not hold the part.
        """
        self.checkpoints.keep(name, part, in_best=in_best, if_missing=if_missing)

    def enter(self, phase: str) -> None:
        """Report to the display what the loop is doing: collecting, learning."""
        self.progress.phases.enter(phase)

    def show_steps(self, env_steps: int) -> None:
        """Show env steps that are collected but not yet learned from, without moving the clock of the schedules."""
        self.progress.step = self.step + env_steps

    def advance(self, env_steps: int) -> None:
        """Move the clock. Schedules and the values that a callback wrote take effect here, and only here."""
        self.controls.take_writes(self.learner, self._in_force)
        self.step += env_steps
        self.progress.step = self.step
        hp = self._in_force = self.learner.hp = self.controls.at(self.step)
        self.source.use(hp)

    def take_writes(self) -> None:
        if self.learner.hp is not self._in_force:
            self.advance(0)

    def record(self, metrics: Reports) -> None:
        """End one iteration: log it and, when they are due, evaluate, call the callbacks and save."""
        check_metrics(self, self.means.add(metrics))
        before, self.recorded = self.recorded, self.step
        evaluate = crossed(self.config.eval_interval, before, self.step)
        if evaluate or crossed(self.config.log_interval, before, self.step):
            write_log(self)
        if evaluate:
            self.evaluate()
        if not self.evaluation.due:
            self.call_back()
        if crossed(self.config.checkpoint_interval, before, self.step):
            self.save(wait=False)

    def call_back(self) -> None:
        for callback in self.callbacks:
            callback(self)
        self.take_writes()

    def evaluate(self) -> None:
        """Evaluate the current policy; the best so far is saved as `checkpoints/best`."""
        self.evaluation.evaluate()

    @property
    def checkpoint_path(self) -> Path | None:
        """The newest checkpoint; waits for one that is being written."""
        return self.checkpoints.newest

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of all parts, and remove the oldest.

        Without `wait` the path may not exist yet when this returns, and the next save raises the errors of this one.
        """
        return self.checkpoints.save(wait=wait)

    def finish(self) -> TrainResult:
        """Write the last checkpoint, the last line of the log and the last evaluation."""
        return finish(self)

    def __enter__(self) -> TrainingRun:
        begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        close(self, error)


def keep_agent(run: TrainingRun) -> None:
    """Make actor, learner and source belong to the run, and show that what is resumed fits together."""
    for name, part in {"actor": run.actor, "learner": run.learner, **run.source.parts()}.items():
        run.keep(name, part, if_missing="refuse")
    run.advance(0)
    if run.resume is not None:
        with checkpoint_errors(f"{run.resume.path}: no action can be chosen with its state"):
            run.source.try_acting()


def interrupt(run: TrainingRun, reason: str) -> None:
    run.stop(reason)
    run.progress.message("stopping at the next checkpoint; press Ctrl-C again to quit without one")


def begin(run: TrainingRun) -> None:
    """Start the clock and the display, react to signals, and make up for an evaluation that was interrupted."""
    run.started = time.perf_counter()
    convolutions = has_convolutions(run.source.spaces, run.learner.hp)
    run.slow_kernels = quick_kernels(run.device, convolutions=convolutions)
    run.interrupts.install()
    title = f"{run.config.algo} on {', '.join(run.source.names)}"
    run.progress.latest = lambda: over_tasks(run.source.latest())
    run.progress.start(run.config.total_timesteps, title, run.step)
    for line in [*resume_notes(run), *(f"warning: {line}" for line in schedule_warnings(run.controls))]:
        run.progress.message(line)
    if run.config.tune:
        run.progress.message("the key tune is for rl-training tune: this run uses the values outside it")
    run.entered = True
    if run.evaluation.due:
        run.evaluate()
        run.call_back()


def finish(run: TrainingRun) -> TrainResult:
    path = run.save()  # before the log, which resets the means: a resumed run continues with these
    write_log(run)
    if not run.interrupts.received and not run.just_evaluated:
        run.evaluate()
    with run.progress.phases.during("saving"):
        run.checkpoints.saver.wait()
    result = TrainResult(run.dir, path, dict(run.metrics), run.config.horizon if run.controls.varying else None)
    complete = run.step >= run.config.total_timesteps  # then at most the last evaluation was interrupted
    stopped = None if complete and run.interrupts.received else run.stop_reason
    write_status(run, f"stopped: {stopped}" if stopped else "finished", global_step=run.step)
    if stopped:
        run.progress.message(f"stopped at step {run.step:,}: {stopped}")
    if run.interrupts.received and not complete:
        raise TrainingInterrupted(result)
    return result


def close(run: TrainingRun, error: BaseException | None) -> None:
    """Give everything back. An error becomes the run's status, and one of an environment tells the last checkpoint."""
    with contextlib.ExitStack() as closing:  # last in, first out, even if one of them fails
        closing.callback(run.slow_kernels)
        closing.callback(run.interrupts.remove)
        closing.callback(run.undo.close)
        closing.callback(run.log.close)
        closing.callback(run.progress.stop)
        if isinstance(error, EnvironmentFault):
            if error.between_updates:
                with contextlib.suppress(Exception):  # then the last good checkpoint is an older one
                    run.save()
            checkpoint = last_good(run.checkpoints.wait_for_last_good())
            error.args = (f"{error}; at step {run.step:,} of training, {checkpoint}",)  # its only argument
        if error is not None and not isinstance(error, TrainingInterrupted):
            write_status(run, f"failed: {type(error).__name__}: {error}")
        try:
            run.checkpoints.saver.wait()
        except Exception as lost:
            if error is None:
                write_status(run, f"failed: {type(lost).__name__}: {lost}")
                raise
            run.progress.message(f"a checkpoint was lost as well: {type(lost).__name__}: {lost}")


def crossed(interval: int, before: int, now: int) -> bool:
    """Whether a multiple of `interval` lies in (before, now]; never for interval 0."""
    return interval > 0 and now // interval > before // interval
