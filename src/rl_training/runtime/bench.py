"""Several configs with several seeds each: trained in parallel, compared in one report."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rl_training.config import TrainConfig
from rl_training.errors import InputError
from rl_training.runtime.jobs import (
    Job,
    Jobs,
    JobsInterrupted,
    Outcome,
    finished_before,
    locked,
    make_place,
    plain_config,
)
from rl_training.runtime.jobs_view import SilentView, make_view
from rl_training.runtime.loading import as_config, load_config
from rl_training.types import Metrics

AnyConfig: TypeAlias = TrainConfig | dict[str, Any] | str | Path


@dataclasses.dataclass(frozen=True)
class BenchRun:
    """One run of the grid."""

    config: str  # its name in the grid
    seed: int
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class BenchResult:
    folder: Path
    runs: list[BenchRun]

    @property
    def failed(self) -> list[BenchRun]:
        return [run for run in self.runs if run.outcome.status == "failed"]

    def metrics(self, config: str) -> list[Metrics]:
        """The last metrics of each seed that has finished."""
        return [run.outcome.metrics for run in self.runs if run.config == config and run.outcome.status == "finished"]


def bench(
    configs: AnyConfig | Sequence[AnyConfig],
    *,
    seeds: Iterable[int] = range(5),
    jobs: int | None = None,
    overrides: Sequence[str] = (),
    out: str | Path = "bench",
    ray: str | None = None,
    progress: str = "auto",
    allow_import: bool = True,
) -> BenchResult:
    """Train each config with each seed, `jobs` at a time, and write a report into `out`.

    What an earlier call with the same `out` has finished is kept, what it left unfinished is resumed. A run that fails
    is recorded with its error, and the others go on. `overrides`: texts such as `algo_kwargs.clip_coef=0.1`, for all
    configs. `ray`: the address of a cluster, `auto` for the one of this machine, or "" to start Ray here.
    """
    folder, seeds = Path(out), list(seeds)
    plan = Grid(named_configs(configs, overrides, allow_import), seeds, folder, allow_import=allow_import)
    with locked(folder, "bench"):
        plan.keep_finished()
        if plan.waiting:
            run_plan(plan, jobs=jobs, ray=ray, progress=progress)
        return BenchResult(folder, [BenchRun(*plan.grid[job.name], plan.outcomes[job.name]) for job in plan.jobs])


class Grid:
    """The plan: each config with each seed."""

    def __init__(
        self, configs: dict[str, TrainConfig], seeds: list[int], folder: Path, *, allow_import: bool = True
    ) -> None:
        if not configs or not seeds:
            raise InputError("bench needs at least one config and one seed")
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise InputError(f"seeds should be different numbers from 0 on, got {seeds}")
        self.jobs: list[Job] = []
        self.grid: dict[str, tuple[str, int]] = {}  # by job: the name of its config, and its seed
        for seed in seeds:  # the first seed of each config first: all can be compared early
            for name, config in configs.items():
                job = f"{name} seed {seed}"
                plain = plain_config(dataclasses.asdict(dataclasses.replace(config, seed=seed)), name)
                self.jobs.append(Job(job, folder / name / f"seed{seed}", plain, allow_import))
                self.grid[job] = name, seed
        self.waiting = deque(self.jobs)
        self.outcomes: dict[str, Outcome] = {}

    def keep_finished(self) -> None:
        for job in self.jobs:
            outcome = finished_before(job)
            if outcome is not None:
                self.outcomes[job.name] = outcome
                self.waiting.remove(job)

    def next(self) -> Job | None:
        return self.waiting.popleft() if self.waiting else None

    def evaluated(self, job: Job, step: int, metrics: Metrics) -> bool:
        return True

    def ended(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.name] = outcome


def run_plan(plan: Grid, *, jobs: int | None, ray: str | None, progress: str) -> None:
    place = make_place(jobs, ray)
    view: SilentView | None = None
    try:
        view = make_view(progress, f"bench, {place.size} at a time", len(plan.jobs))
        view.kept = len(plan.outcomes)
        if view.kept:
            view.message(f"{view.kept} of {len(plan.jobs)} runs have finished already")
        Jobs(plan, place, view).run()
    except JobsInterrupted:
        done = sum(outcome.status == "finished" for outcome in plan.outcomes.values())
        raise JobsInterrupted(
            f"interrupted: {done} of {len(plan.jobs)} runs have finished; the same command continues with the others"
        ) from None
    finally:
        if view is not None:
            view.close()
        place.close()


def named_configs(
    given: AnyConfig | Sequence[AnyConfig], overrides: Sequence[str], allow_import: bool
) -> dict[str, TrainConfig]:
    """Configs by names for folders and tables: `ppo-cartpole` for configs/ppo/cartpole.yaml."""
    found: dict[str, TrainConfig] = {}
    for each in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        if isinstance(each, str | Path):
            config = load_config(each, overrides=overrides, allow_import=allow_import)
            name = Path(each).stem
        elif overrides:
            raise InputError("overrides are for configs that are files; change the keys of the others instead")
        else:
            config = as_config(each)
            name = config.tasks[0].env_id
        name = re.sub(r"[^\w.-]+", "-", name)
        name = name if name.startswith(config.algo) else f"{config.algo}-{name}"
        number, base = 1, name
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found[name] = config
    return found


def parse_seeds(text: str) -> list[int]:
    """0-4, or 0,3,7, or 0-2,10."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(10_000):
            raise InputError(f"seeds should be like 0-4 or 0,3,7, got {text!r}")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return seeds
