"""What a run saves and when: its parts, the newest checkpoints, the best one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_training.runtime.checkpoints import Checkpoint, prune_checkpoints, save_checkpoint, step_dir_name
from rl_training.runtime.outcome import TrainingFailed
from rl_training.runtime.restoring import missing_note, restore_part
from rl_training.runtime.saving import Saver
from rl_training.runtime.setup import config_to_dict
from rl_training.types import State

if TYPE_CHECKING:
    from rl_training.runtime.run import TrainingRun

IfMissing = Literal["report", "refuse"]


class RunCheckpoints:
    """The parts that belong to a run: saved with it and, when it is resumed, restored with it."""

    def __init__(self, run: TrainingRun, resume: Checkpoint | None) -> None:
        self.run, self.resume = run, resume
        self.parts: dict[str, Any] = {}
        self.not_in_best: list[str] = []
        self.missing: list[str] = []  # parts that the checkpoint resumed from does not hold
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
                self.run.progress.message(missing_note(self.run, name))

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

        def written() -> None:
            self._newest = path
            try:
                prune_checkpoints(folder, run.config.keep_checkpoints)
            except OSError as error:
                raise self.failure(f"old checkpoints in {folder} cannot be removed: {error}") from error

        if self._newest != path:
            run.check_finite(run.means.read())  # a diverged run must not replace the last good checkpoint
            self._write(path, wait=wait, then=written)
        return path

    def save_best(self) -> None:
        self._write(self.run.dir / "checkpoints" / "best", left_out=self.not_in_best, wait=False)

    def _write(
        self, path: Path, *, wait: bool, left_out: Collection[str] = (), then: Callable[[], None] = lambda: None
    ) -> None:
        run = self.run
        run.take_writes()
        config, info = config_to_dict(run.config, run.controls), run.info()

        def write(state: dict[str, State]) -> None:
            try:
                save_checkpoint(path, state=state, config=config, info=info)
                then()
            except OSError as error:
                raise self.failure(f"{path} cannot be written: {error.strerror or error}") from error

        parts = {name: part for name, part in self.parts.items() if name not in left_out}
        with run.progress.phases.during("saving"):
            self.saver.save(parts, write, wait=wait)
