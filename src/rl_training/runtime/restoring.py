"""Restoring parts from a checkpoint, and the notes that a resumed run prints."""

from __future__ import annotations

import contextlib
from bisect import bisect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rl_training.data.state_check import StateMismatch, compare_state
from rl_training.errors import CheckpointError, InputError
from rl_training.runtime.callbacks import CALLBACK
from rl_training.runtime.checkpoint_format import Checkpoint
from rl_training.runtime.controls import Controls
from rl_training.runtime.preview import idle_learning_rates

if TYPE_CHECKING:
    from rl_training.runtime.run import TrainingRun

VALID = "from here on the run is a valid continuation, but not bit for bit the one that was interrupted"


@contextlib.contextmanager
def checkpoint_errors(where: str) -> Iterator[None]:
    """Turn any error into a CheckpointError that begins with `where`.

    A checkpoint with the right checksums may still have invalid content.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        known = isinstance(error, InputError | StateMismatch)
        raise CheckpointError(f"{where}: {error if known else f'{type(error).__name__}: {error}'}") from error


def restore_part(checkpoint: Checkpoint, name: str, part: Any) -> None:
    """Load the state of a part, compared with its `state_pattern` first if it has one: see `compare_state`."""
    file = checkpoint.path / "state.json"
    if name not in checkpoint.state:
        raise CheckpointError(f"{file}: {name} is missing; use another checkpoint")
    state = checkpoint.state.pop(name)  # a replay may fill half of the memory: keep no second reference
    with checkpoint_errors(f"{file}: {name} cannot be restored"):
        if hasattr(part, "state_pattern"):
            compare_state(part.state_pattern(), state, name)
        part.load_state_dict(state)


def resume_notes(run: TrainingRun) -> list[str]:
    """Where a run was resumed from, the horizon of its schedules, and what could not be restored."""
    if run.resume is None:
        return []
    path = run.resume.path
    notes = [f"resumed from {path} at step {run.step:,}; schedules run over {run.config.horizon:,} steps"]
    overrides = run.controls.overrides.items()
    notes += [f"{name} stays at {value}, as it was set during training" for name, value in overrides]
    notes += idle_notes(run)
    for name, (lost, count) in run.source.not_restored().items():
        which = "all environments" if len(lost) == count else f"environments {', '.join(map(str, lost))}"
        notes.append(f"{which} of {name} cannot give back their state and began new episodes: {VALID}")
    if run.source.not_exact:
        notes.append(f"{run.source.not_exact}: {VALID}")
    unused = [name.removeprefix(CALLBACK) for name in run.resume.state if name.startswith(CALLBACK)]
    notes += [f"{path} holds the state of a callback {name}, which this run does not have" for name in unused]
    return notes + [missing_note(run.resume, name) for name in run.checkpoints.missing]


def idle_notes(run: TrainingRun) -> list[str]:
    """A warning for each learning rate that has reached 0, so that nothing more is learned."""
    total = run.config.total_timesteps
    late = total - (total - run.step) // 10  # look for rates that are 0 in the last tenth of the remaining steps
    names = idle_learning_rates(run.controls, late)
    if not names:
        return []
    stretched = Controls.of(run.config, run.recipe.hyperparameters, horizon=total)
    stretched.overrides = run.controls.overrides
    if set(names) & set(idle_learning_rates(stretched, late)):
        remedy = "write another value in a callback, or train anew with another schedule"
    else:
        remedy = "--extend stretch (from Python: extend='stretch') lets schedules run over the new total"
    firsts = {name: _idle_from(run, name, late) for name in names}
    return [
        f"WARNING: {name} is 0 from step {first:,} to step {total:,}, so nothing is learned: {remedy}"
        for name, first in firsts.items()
    ]


def _idle_from(run: TrainingRun, name: str, late: int) -> int:
    """The first future step from which the learning rate is 0 to the end."""
    steps = range(run.step + 1, late + 1)
    return steps[bisect(steps, False, key=lambda step: name in idle_learning_rates(run.controls, step))]


def missing_note(checkpoint: Checkpoint, name: str) -> str:
    if name.startswith(CALLBACK):
        return f"{checkpoint.path} holds no state of the callback {name.removeprefix(CALLBACK)}: it begins anew"
    return f"{checkpoint.path} holds no {name}: it is filled anew, so the run is valid but not the same"
