"""The parts that a run saves and restores, and its checkpoints: the newest ones and the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_training.errors import InputError
from rl_training.runtime.checkpoint_format import Checkpoint
from rl_training.runtime.checkpoints import prune_checkpoints, save_checkpoint, step_dir_name
from rl_training.runtime.outcome import TrainingFailed
from rl_training.runtime.randomness import global_state, set_global_state
from rl_training.runtime.restoring import missing_note, restore_part
from rl_training.runtime.run_folder import config_to_dict
from rl_training.runtime.run_log import check_metrics
from rl_training.runtime.saving import Saver
from rl_training.types import State

if TYPE_CHECKING:
    from rl_training.runtime.run import TrainingRun

IfMissing = Literal["report", "refuse"]


class RunCheckpoints:
    def __init__(self, run: TrainingRun, resume: Checkpoint | None) -> None:
        self.run, self.resume = run, resume
        self.parts: dict[str, Any] = {}
        self.not_in_best: list[str] = []
        self.missing: list[str] = []  # parts that the resumed checkpoint does not hold
        self.saver = Saver()
        self._newest: Path | None = None  # of those that are complete

    def keep(self, name: str, part: Any, *, in_best: bool = True, if_missing: IfMissing = "report") -> None:
        """See TrainingRun.keep."""
        self.parts[name] = part
        if not in_best:
            self.not_in_best.append(name)
        if self.resume is None:
            return
        if name in self.resume.state or if_missing == "refuse":
            restore_part(self.resume, name, part)
        else:
            self.missing.append(name)
            if self.run.entered:
                self.run.progress.message(missing_note(self.resume, name))

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint; waits for one that is being written."""
        self.saver.join()
        return self._newest

    @property
    def last_good(self) -> Path | None:
        """The newest complete checkpoint, of this run or the one it was resumed from."""
        paths = [self._newest, self.resume.path if self.resume else None]
        return next((path for path in paths if path is not None and path.exists()), None)

    def wait_for_last_good(self) -> Path | None:
        self.saver.join()
        return self.last_good

    def failure(self, cause: str) -> TrainingFailed:
        """The error to raise where something outside the algorithm ends the run; from any thread."""
        return TrainingFailed(cause, step=self.run.step, run_dir=self.run.dir, checkpoint_path=self.last_good)

    def save(self, *, wait: bool) -> Path:
        """See TrainingRun.save."""
        run = self.run
        with run.progress.phases.during("saving"):
            self.saver.wait()
        folder = run.dir / "checkpoints"
        path = folder / step_dir_name(run.step)

        def prune() -> None:
            self._newest = path
            try:
                prune_checkpoints(folder, run.config.keep_checkpoints)
            except OSError as error:
                raise self.failure(f"old checkpoints in {folder} cannot be removed: {error}") from error

        if self._newest != path:
            check_metrics(run, run.means.read())  # a diverged run must not replace the last good checkpoint
            self._write(path, wait=wait, then=prune)
        return path

    def save_best(self) -> None:
        self._write(self.run.dir / "checkpoints" / "best", left_out=self.not_in_best, wait=False)

    def _write(
        self, path: Path, *, wait: bool, left_out: Collection[str] = (), then: Callable[[], None] = lambda: None
    ) -> None:
        run = self.run
        run.take_writes()
        config, info = config_to_dict(run.config, run.controls), manifest_info(run)

        def write(state: dict[str, State]) -> None:
            try:
                save_checkpoint(path, state=state, config=config, info=info)
                then()
            except OSError as error:
                raise self.failure(f"{path} cannot be written: {error.strerror or error}") from error

        parts = {name: part for name, part in self.parts.items() if name not in left_out}
        with run.progress.phases.during("saving"):
            self.saver.save(parts, write, wait=wait)


def manifest_info(run: TrainingRun) -> dict[str, Any]:
    return {
        "global_step": run.step,
        "algo": run.config.algo,
        "env_id": run.config.env_id,
        "metrics": {name: value for name, value in run.metrics.items() if math.isfinite(value)},
        "spaces": run.source.spaces_json(),
    }


class RunState:
    """The part `run` of a checkpoint: clock, metrics, evaluations and the process-wide random generators."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def state_dict(self) -> State:
        run, evaluation = self.run, self.run.evaluation
        return {
            "step": run.step,
            "wall_seconds": run.wall_seconds,
            "evaluations": evaluation.count,
            "evaluated": evaluation.step,
            "evaluation_due": evaluation.due,
            "best_eval": evaluation.best,
            "metrics": dict(run.metrics),
            "means": run.means.state_dict(),
            "generators": global_state(),
        }

    def state_pattern(self) -> State:
        numbers = {
            "step": int,
            "wall_seconds": float,
            "evaluations": int,
            "evaluated": -1,
            "evaluation_due": bool,
            "best_eval": float,
        }
        means = {"sums": {str: float}, "counts": {str: int}}
        generators = global_state() | {"python": [int, [int], float | None]}
        return {**numbers, "metrics": {str: float}, "means": means, "generators": generators}

    def load_state_dict(self, state: State) -> None:
        run, step, evaluation = self.run, state["step"], self.run.evaluation
        if run.resume is not None and step != run.resume.step:
            raise InputError(f"run.step is {step:,}, but the checkpoint is of step {run.resume.step:,}")
        if not -1 <= state["evaluated"] <= step:
            raise InputError(f"run.evaluated is {state['evaluated']:,}, which is no step before {step:,}")
        evaluation.count, evaluation.step = state["evaluations"], state["evaluated"]
        evaluation.due, evaluation.best = state["evaluation_due"], state["best_eval"]
        run.earlier_seconds = state["wall_seconds"]
        run.metrics = dict(state["metrics"])
        run.means.load_state_dict(state["means"])
        set_global_state(state["generators"])
        run.advance(step - run.step)
        run.recorded = run.step
