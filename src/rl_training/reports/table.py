"""The table of groups: scores with their interval, speed, machine and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from rl_training.ops.statistics import bootstrap_interval, interquartile_mean
from rl_training.reports.groups import Group
from rl_training.reports.runs import Run, is_number
from rl_training.runtime.number_text import duration, number

METRIC = "eval_return_mean"
VERSIONS = ("rl_training", "python", "torch", "gymnasium", "numpy")


@dataclass(frozen=True)
class Row:
    """One group. Scores are the last values of the metric; None where no run has one."""

    group: str
    iqm: float | None
    low: float | None  # of the 95 % stratified bootstrap interval of the IQM; None with fewer than two scores
    high: float | None
    mean: float | None
    worst: float | None
    worst_seed: int | None
    seeds: list[int]
    statuses: dict[str, int]  # finished, stopped, failed, running: how many runs
    without_score: int
    steps: int  # the most of a run
    steps_per_second: float | None  # median over the runs, training alone
    wall_seconds: float | None  # median over the runs
    hardware: str
    versions: str
    commit: str
    differences: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def table(groups: Sequence[Group], metric: str = METRIC) -> list[Row]:
    return [row_of(group, metric) for group in groups]


def row_of(group: Group, metric: str) -> Row:
    found = [(run, run.score(metric)) for run in group.runs]
    scored = [(run, score) for run, score in found if score is not None]
    scores = np.array([score for _, score in scored])
    strata = [task for task, (_, score) in zip(group.strata, found, strict=True) if score is not None]
    low, high = bootstrap_interval(scores, strata) if len(scores) > 1 else (None, None)
    worst = min(scored, key=lambda pair: pair[1], default=None)
    return Row(
        group=group.name,
        iqm=float(interquartile_mean(scores)) if len(scores) else None,
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        mean=fmean(scores) if len(scores) else None,
        worst=worst[1] if worst else None,
        worst_seed=worst[0].seed if worst else None,
        seeds=[run.seed for run in group.runs],
        statuses=dict(Counter(run.status.split(":")[0] for run in group.runs)),
        without_score=len(found) - len(scored),
        steps=max(run.step for run in group.runs),
        steps_per_second=middle(run.score("steps_per_second") for run in group.runs),
        wall_seconds=middle(run.wall_seconds for run in group.runs),
        hardware=each(hardware_of(run) for run in group.runs),
        versions=each(versions_of(run) for run in group.runs),
        commit=each(commit_of(run) for run in group.runs),
        differences=group.differences,
    )


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and is_number(value)]
    return median(known) if known else None


def each(texts: Iterable[str]) -> str:
    """The text that all runs share, or all that there are."""
    return "; ".join(dict.fromkeys(text for text in texts if text))


def hardware_of(run: Run) -> str:
    facts = run.metadata
    cores = f"{facts['cpu_count']} cores" if facts.get("cpu_count") else ""
    parts = [facts.get("gpu"), facts.get("processor") or facts.get("platform"), cores]
    return ", ".join(str(part) for part in parts if part)


def versions_of(run: Run) -> str:
    versions = run.metadata.get("versions") or {}
    return ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)


def commit_of(run: Run) -> str:
    git = run.metadata.get("git") or {}
    return f"{str(git['commit'])[:9]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else ""


HEADINGS = ("group", "IQM", "95 % interval", "mean", "worst seed", "seeds", "steps", "steps/s", "wall")


def cells(row: Row) -> list[str]:
    """The texts of a row, under HEADINGS."""
    return [
        row.group,
        score_text(row.iqm),
        f"{number(row.low)} to {number(row.high)}" if row.low is not None else "-",
        score_text(row.mean),
        f"{score_text(row.worst)} ({row.worst_seed})" if row.worst is not None else "-",
        seeds_text(row),
        f"{row.steps:,}",
        f"{row.steps_per_second:,.0f}" if row.steps_per_second is not None else "-",
        duration(row.wall_seconds),
    ]


def score_text(value: float | None) -> str:
    return "-" if value is None else number(value)


def seeds_text(row: Row) -> str:
    """`5`, or `5: 1 failed, 1 without a score`: whatever is not as it should be."""
    odd = [f"{count} {status}" for status, count in row.statuses.items() if status != "finished"]
    odd += [f"{row.without_score} without a score"] if row.without_score else []
    return f"{len(row.seeds)}{': ' + ', '.join(odd) if odd else ''}"


def text_table(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    lines = [list(HEADINGS), *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(aligned(line, widths) for line in lines)


def aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    """The first cell to the left, the others to the right."""
    first, *rest = (f"{cell:>{width}}" if column else f"{cell:<{width}}"
                    for column, (cell, width) in enumerate(zip(line, widths, strict=True)))  # fmt: skip
    return "  ".join([first, *rest]).rstrip()
