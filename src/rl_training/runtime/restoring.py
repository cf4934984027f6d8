"""From a checkpoint back to the parts of a run, and what a resumed run tells its user."""

from __future__ import annotations

import contextlib
from bisect import bisect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rl_training.config import InputError
from rl_training.data.state_check import StateMismatch, compare_state
from rl_training.runtime.callbacks import CALLBACK
from rl_training.runtime.checkpoints import Checkpoint, CheckpointError
from rl_training.runtime.controls import Controls

if TYPE_CHECKING:
    from rl_training.runtime.run import TrainingRun


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Checksums say that a checkpoint is as it was written, not that it makes sense: whatever goes wrong inside is a
    CheckpointError, which begins with `where`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        known = isinstance(error, InputError | StateMismatch)
        raise CheckpointError(f"{where}: {error if known else f'{type(error).__name__}: {error}'}") from error


def restore_part(checkpoint: Checkpoint, name: str, part: Any) -> None:
    """Load a part's state. One that has a `state_pattern` is compared with it first: see `compare_state`."""
    file = checkpoint.path / "state.json"
    if name not in checkpoint.state:
        raise CheckpointError(f"{file}: {name} is missing; use another checkpoint")
    state = checkpoint.state.pop(name)  # not kept beside: a replay may fill half the memory
    with reading(f"{file}: {name} cannot be restored"):
        if hasattr(part, "state_pattern"):
            compare_state(part.state_pattern(), state, name)
        part.load_state_dict(state)


def resume_notes(run: TrainingRun) -> list[str]:
    """What a resumed run tells its user: from where, over which horizon, and what could not be restored."""
    if run.resume is None:
        return []
    notes = [f"resumed from {run.resume.path} at step {run.step:,}; schedules run over {run.config.horizon:,} steps"]
    notes += [
        f"{name} stays at {value}, as it was set during training" for name, value in run.controls.overrides.items()
    ]
    notes += idle_notes(run)
    for name, (lost, count) in run.source.not_restored().items():
        which = "all environments" if len(lost) == count else f"environments {', '.join(map(str, lost))}"
        notes.append(
            f"{which} of {name} cannot give back their state and began new episodes: from here on the run is a valid "
            "continuation, but not bit for bit the one that was interrupted"
        )
    unused = [name.removeprefix(CALLBACK) for name in run.resume.state if name.startswith(CALLBACK)]
    notes += [
        f"{run.resume.path} holds the state of a callback {name}, which this run does not have" for name in unused
    ]
    return notes + [missing_note(run, name) for name in run.checkpoints.missing]


def run_facts(run: TrainingRun) -> dict[str, Any]:
    """What `metadata.json` says of a run beside its config: where it runs, and where it came from."""
    return {
        "device": str(run.device),
        "num_threads": torch.get_num_threads(),
        **run.source.facts(),
        "schedule_horizon": run.config.horizon,
        "resumed_from": str(run.resume.path) if run.resume else None,
        "resumed_at_step": run.resume.step if run.resume else None,
    }


def idle_notes(run: TrainingRun) -> list[str]:
    """A warning where nothing would be learned, because a learning rate has come to its end."""
    total = run.config.total_timesteps
    late = total - (total - run.step) // 10  # a rate that is 0 in the last tenth of what is to come
    names = run.controls.idle_learning_rates(late)
    if not names:
        return []
    stretched = Controls.of(run.config, run.recipe.hyperparameters, horizon=total)
    stretched.overrides = run.controls.overrides
    helps = not set(names) & set(stretched.idle_learning_rates(late))
    remedy = (
        "--extend stretch (from Python: extend='stretch') lets schedules run over the new total"
        if helps
        else "write another value in a callback, or train anew with another schedule"
    )
    return [
        f"WARNING: {name} is 0 from step {_idle_from(run, name, late):,} to step {total:,}, so nothing is learned: "
        f"{remedy}"
        for name in names
    ]


def _idle_from(run: TrainingRun, name: str, late: int) -> int:
    """The first step to come from which the learning rate is 0 to the end."""
    steps = range(run.step + 1, late + 1)
    return steps[bisect(steps, False, key=lambda step: name in run.controls.idle_learning_rates(step))]


def missing_note(run: TrainingRun, name: str) -> str:
    assert run.resume is not None
    if name.startswith(CALLBACK):
        return f"{run.resume.path} holds no state of the callback {name.removeprefix(CALLBACK)}: it begins anew"
    return f"{run.resume.path} holds no {name}: it is filled anew, so the run is valid but not the same"
