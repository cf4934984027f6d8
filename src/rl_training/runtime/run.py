"""A training run: everything a loop needs that is not the algorithm itself."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_training.config import InputError, TrainConfig
from rl_training.envs.episodes import EnvironmentFault
from rl_training.runtime.callbacks import Callback, build_callbacks, name_callbacks
from rl_training.runtime.checkpoints import Checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.evaluation import Player, check_evaluation, describe_evaluation, evaluate
from rl_training.runtime.interrupts import Interrupts
from rl_training.runtime.limits import check_memory
from rl_training.runtime.metadata import update_metadata, write_metadata, write_text_atomic
from rl_training.runtime.metrics import (
    MetricsLog,
    RunningMeans,
    TrainingDiverged,
    check_finite,
    import_wandb,
    over_tasks,
)
from rl_training.runtime.outcome import TrainingFailed, TrainingInterrupted, TrainResult, last_good
from rl_training.runtime.progress import Progress, make_progress
from rl_training.runtime.randomness import global_state, own_global_state, seed_of, set_global_state
from rl_training.runtime.recipe import Recipe
from rl_training.runtime.restoring import reading, resume_notes, run_facts
from rl_training.runtime.run_checkpoints import IfMissing, RunCheckpoints
from rl_training.runtime.setup import (
    build_actor_and_learner,
    check_players,
    config_text,
    has_convolutions,
    make_run_dir,
    pick_device,
    pick_threads,
    quick_kernels,
    reuse_memory,
    undone_on_error,
    wandb_options,
    with_env_defaults,
)
from rl_training.runtime.sources import open_source
from rl_training.types import Metrics, Reports, State

__all__ = ["TrainResult", "TrainingFailed", "TrainingInterrupted", "TrainingRun"]


class TrainingRun:
    """The clock, the source of experience, the learner, the log, evaluation and checkpoints of one run."""

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
        """`prepare` keeps what a loop needs, before anything is written: see `keep`."""
        if config.algo != recipe.name:
            raise InputError(f"this trains {recipe.name}, but the config says algo: {config.algo}")
        self.config = config = with_env_defaults(config, recipe)
        self.recipe, self.resume = recipe, resume
        self.controls = Controls.of(config, recipe.hyperparameters)
        self.step, self.evaluations, self.best_eval = 0, 0, -math.inf
        self.metrics: Metrics = {}
        self.means = RunningMeans()
        self.stop_reason: str | None = None
        self.checkpoints = RunCheckpoints(self, resume)
        self.parts = self.checkpoints.parts
        self._recorded, self._logged, self._evaluated = 0, -1, -1  # the steps of the last of each
        self._best_here = -math.inf  # of this run's own folder; best_eval is that of all it was resumed from, too
        self._evaluation_due = False  # one was interrupted: a resumed run begins with it
        self.entered = False
        self.progress: Progress = make_progress(progress, schedule_names=tuple(self.controls.varying))
        self._undo = contextlib.ExitStack()  # at the end, or where this fails: the process is left as it was found
        with undone_on_error(self, self._undo):
            self._build()
            self.callbacks = [*build_callbacks(config.callbacks), *callbacks]
            prepare(self)
            for name, callback in name_callbacks(self.callbacks).items():
                self.keep(name, callback)
            # What can still be wrong with the input comes before the folder, so that none is left behind.
            wandb, text = wandb_options(config), config_text(config, self.controls)
            if wandb is not None:
                import_wandb()
            self.keep("run", self, if_missing="refuse")
            self._open_folder(run_suffix, text, wandb)
        self.interrupts = Interrupts(self._interrupt)

    def _build(self) -> None:
        config, recipe = self.config, self.recipe
        self._undo.callback(torch.set_num_threads, torch.get_num_threads())
        self._undo.enter_context(own_global_state(seed_of(config.seed, "process")))
        self.source = open_source(config, recipe)
        self._undo.callback(self.source.close)
        spaces = self.source.spaces
        check_players(config, recipe, spaces)
        self.keep("controls", self.controls, if_missing="refuse")
        hp = self._in_force = self.controls.at(0)
        check_memory(config, self.controls, spaces)
        self.device = pick_device(config.device, spaces, hp)
        self._convolutions = has_convolutions(spaces, hp)
        with self._reading("an actor and a learner for its config cannot be made"):
            self.actor, self.learner = build_actor_and_learner(config, recipe, spaces, hp, self.device)
        self.fields = [recipe.fields(task, hp) for task in spaces]
        actors = [recipe.actor_of(self.actor, task) for task in range(len(spaces))]
        self.source.attach(actors, self.fields)
        parts = zip(actors, spaces, self.source.normalizers, strict=True)
        self.players = [Player(*each, recipe.box_actions) for each in parts]
        check_evaluation(self.players, config)
        torch.set_num_threads(pick_threads(config.num_threads, self.learner.num_parameters, self.device))
        reuse_memory()
        for name, part in {"actor": self.actor, "learner": self.learner, **self.source.parts()}.items():
            self.keep(name, part, if_missing="refuse")
        self.advance(0)
        if self.resume is not None:
            with self._reading("no action can be chosen with what it holds"):
                self.source.try_acting()

    def _reading(self, where: str) -> contextlib.AbstractContextManager[None]:
        """See `reading`; of a run that is not resumed, errors are left as they are."""
        return reading(f"{self.resume.path}: {where}") if self.resume else contextlib.nullcontext()

    def _open_folder(self, run_suffix: str | None, config_text: str, wandb: dict[str, Any] | None) -> None:
        self.dir = make_run_dir(self.config, run_suffix, self.resume)
        try:
            write_text_atomic(self.dir / "config.yaml", config_text)
            write_metadata(self.dir, command=sys.argv, seed=self.config.seed, extra=run_facts(self))
            names = {"schedule_names": self.controls.varying, "hyperparameter_names": self.controls.schedules}
            self.log = MetricsLog(self.dir, wandb=wandb, **names)
        except OSError as error:
            raise InputError(f"run folder {self.dir} cannot be written: {error.strerror or error}") from error

    @property
    def running(self) -> bool:
        return self.step < self.config.total_timesteps and self.stop_reason is None

    @property
    def just_evaluated(self) -> bool:
        """Whether `metrics` holds an evaluation of this very step."""
        return self._evaluated == self.step

    def stop(self, reason: str) -> None:
        """Stop after the record now under way; `reason` is printed and saved."""
        self.stop_reason = self.stop_reason or reason

    def _interrupt(self, reason: str) -> None:
        self.stop(reason)
        self.progress.message("stopping at the next checkpoint; press Ctrl-C again to quit without one")

    def keep(self, name: str, part: Any, *, in_best: bool = True, if_missing: IfMissing = "report") -> None:
        """Make `part` belong to the run: saved with it and, when resuming, restored with it.

        A part with `hold` is written while training goes on: see `Saver.save`. if_missing: what to do about a
        checkpoint that does not hold it.
        """
        self.checkpoints.keep(name, part, in_best=in_best, if_missing=if_missing)

    def enter(self, phase: str) -> None:
        """Tell the display what the loop is doing: collecting, learning."""
        self.progress.phases.enter(phase)

    def show_steps(self, env_steps: int) -> None:
        """Show env steps that are collected but not yet learned from: the clock of the schedules moves later."""
        self.progress.step = self.step + env_steps

    def advance(self, env_steps: int) -> None:
        """Move the clock. Every schedule takes effect here, and only here, and so does what a callback has written."""
        self.controls.take_writes(self.learner, self._in_force)
        self.step += env_steps
        self.progress.step = self.step
        hp = self._in_force = self.learner.hp = self.controls.at(self.step)
        self.source.use(hp)

    def take_writes(self) -> None:
        if self.learner.hp is not self._in_force:
            self.advance(0)

    def record(self, metrics: Reports) -> None:
        """End one iteration: log it and, when they are due, evaluate, call back and save."""
        self.check_finite(self.means.add(metrics))
        before, self._recorded = self._recorded, self.step
        evaluate = crossed(self.config.eval_interval, before, self.step)
        if evaluate or crossed(self.config.log_interval, before, self.step):
            self._log()
        if evaluate:
            self.evaluate()
        if not self._evaluation_due:
            self._call_back()
        if crossed(self.config.checkpoint_interval, before, self.step):
            self.save(wait=False)

    def _call_back(self) -> None:
        for callback in self.callbacks:
            callback(self)
        self.take_writes()

    def check_finite(self, metrics: Metrics) -> None:
        try:
            check_finite(metrics, self.step)
        except TrainingDiverged as diverged:
            self.checkpoints.saver.join()
            remedy = f"try a lower learning rate; {last_good(self.checkpoints.last_good)}"
            raise TrainingDiverged(diverged.step, diverged.name, diverged.value, remedy=remedy) from None

    def _current(self) -> Metrics:
        trained = self.step - (self.resume.step if self.resume else 0)
        return {
            "global_step": self.step,
            "gradient_steps": self.learner.gradient_steps,
            **over_tasks(self.source.recent()),
            "steps_per_second": trained / max(time.perf_counter() - self._clock_zero, 1e-9),
            **self.controls.scalars_of(self.learner.hp),
        }

    def _log(self) -> None:
        if self._logged == self.step:
            return
        self._logged = self.step
        means = self.means.mean()
        self.check_finite(means)
        record = means | self._current()  # no evaluation: that of an earlier step is not this one's
        self.metrics |= record
        self.log.write(record)
        self.progress.update(self.step, self.metrics)

    def evaluate(self) -> None:
        """Evaluate the policy as it is now; the best so far is saved as `checkpoints/best`."""
        started = time.perf_counter()
        with self.progress.phases.during("evaluating"):
            result = evaluate(self.players, self.config, stopped=lambda: bool(self.interrupts.received))
        self._evaluation_due = result is None
        if result is None:
            return
        self._clock_zero += time.perf_counter() - started  # steps_per_second is the speed of training
        self.metrics |= result | self._current()
        self.evaluations, self._evaluated = self.evaluations + 1, self.step
        self.log.write(self._current() | result)
        self.progress.update(self.step, self.metrics, line=False)
        self.progress.message(f"evaluation at step {self.step:,}: {describe_evaluation(result)}")
        if result["eval_return_mean"] > self._best_here:
            self._best_here = result["eval_return_mean"]
            self.best_eval = max(self.best_eval, self._best_here)
            self.checkpoints.save_best()

    @property
    def checkpoint_path(self) -> Path | None:
        """The newest checkpoint; waits for one that is being written."""
        return self.checkpoints.newest

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of everything that was kept, and remove the oldest.

        Without `wait` the path may not exist yet when this returns; what goes wrong is raised by the next save.
        """
        return self.checkpoints.save(wait=wait)

    def info(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the run."""
        return {
            "global_step": self.step,
            "algo": self.config.algo,
            "env_id": self.config.env_id,
            "metrics": {k: v for k, v in self.metrics.items() if math.isfinite(v)},
            "spaces": self.source.spaces_json(),
        }

    def state_dict(self) -> State:
        return {
            "step": self.step,
            "evaluations": self.evaluations,
            "evaluated": self._evaluated,
            "evaluation_due": self._evaluation_due,
            "best_eval": self.best_eval,
            "metrics": dict(self.metrics),
            "means": self.means.state_dict(),
            "generators": global_state(),
        }

    def state_pattern(self) -> State:
        numbers = {"step": int, "evaluations": int, "evaluated": -1, "evaluation_due": bool, "best_eval": float}
        means = {"sums": {str: float}, "counts": {str: int}}
        generators = global_state() | {"python": [int, [int], float | None]}
        return {**numbers, "metrics": {str: float}, "means": means, "generators": generators}

    def load_state_dict(self, state: State) -> None:
        if self.resume is not None and state["step"] != self.resume.step:
            raise InputError(f"run.step is {state['step']:,}, but the checkpoint is of step {self.resume.step:,}")
        if not -1 <= state["evaluated"] <= state["step"]:
            raise InputError(f"run.evaluated is {state['evaluated']:,}, which is no step before {state['step']:,}")
        self.evaluations, self._evaluated, self.best_eval = state["evaluations"], state["evaluated"], state["best_eval"]
        self._evaluation_due = state["evaluation_due"]
        self.metrics = dict(state["metrics"])
        self.means.load_state_dict(state["means"])
        set_global_state(state["generators"])
        self.step = 0
        self.advance(state["step"])
        self._recorded = self.step

    def finish(self) -> TrainResult:
        """The last checkpoint, the last evaluation, the last line of the log."""
        path = self.save()  # before the log, which starts new means: a resumed run goes on with these
        self._log()
        if not self.interrupts.received and self._evaluated != self.step:
            self.evaluate()
        with self.progress.phases.during("saving"):
            self.checkpoints.saver.wait()
        end = self.config.horizon if self.controls.varying else None
        result = TrainResult(self.dir, path, dict(self.metrics), end)
        complete = self.step >= self.config.total_timesteps  # then at most the last evaluation was interrupted
        stopped = self.stop_reason if not (complete and self.interrupts.received) else None
        self._note_status(f"stopped: {stopped}" if stopped else "finished", global_step=self.step)
        if stopped:
            self.progress.message(f"stopped at step {self.step:,}: {stopped}")
        if self.interrupts.received and not complete:
            raise TrainingInterrupted(result)
        return result

    def __enter__(self) -> TrainingRun:
        title = f"{self.config.algo} on {', '.join(self.source.names)}"
        self._clock_zero = time.perf_counter()
        self._slow_kernels = quick_kernels(self.device, convolutions=self._convolutions)
        self.interrupts.install()
        self.progress.start(self.config.total_timesteps, title, self.step)
        for line in [*resume_notes(self), *(f"warning: {line}" for line in self.controls.warnings())]:
            self.progress.message(line)
        self.entered = True
        if self._evaluation_due:
            self.evaluate()
            self._call_back()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Last in, first out; one that fails does not keep the others from closing.
        saver = self.checkpoints.saver
        with contextlib.ExitStack() as closing:
            closing.callback(self._slow_kernels)
            closing.callback(self.interrupts.remove)
            closing.callback(self._undo.close)
            closing.callback(self.log.close)
            closing.callback(self.progress.stop)
            if isinstance(error, EnvironmentFault):
                saver.join()
                where = f"at step {self.step:,} of training, {last_good(self.checkpoints.last_good)}"
                error.args = (f"{error}; {where}",)  # its message is its only argument
            if error is not None and not isinstance(error, TrainingInterrupted):
                self._note_status(f"failed: {type(error).__name__}: {error}")
            try:
                saver.wait()
            except Exception as lost:
                if error is None:
                    self._note_status(f"failed: {type(lost).__name__}: {lost}")
                    raise
                self.progress.message(f"a checkpoint was lost as well: {type(lost).__name__}: {lost}")

    def _note_status(self, status: str, **more: Any) -> None:
        try:
            update_metadata(self.dir, status=status, **more)
        except OSError as error:
            self.progress.message(f"{self.dir}: the status cannot be written ({error.strerror or error}): {status}")


def crossed(interval: int, before: int, now: int) -> bool:
    """Whether a multiple of `interval` lies in (before, now]; never for interval 0."""
    return interval > 0 and now // interval > before // interval
