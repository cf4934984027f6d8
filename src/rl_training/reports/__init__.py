"""Reports: run folders, the groups they form, the table of their scores, and a page with their curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rl_training.reports.groups import Group, group_runs
from rl_training.reports.page import write_report
from rl_training.reports.runs import Curve, Run, load_run, load_runs
from rl_training.reports.table import METRIC, Row, table, text_table

__all__ = [
    "Curve",
    "Group",
    "Row",
    "Run",
    "group_runs",
    "load_run",
    "load_runs",
    "report",
    "table",
    "text_table",
    "write_report",
]


def report(
    paths: Iterable[str | Path],
    out: str | Path = "report.html",
    *,
    group_by: str = "config",
    metric: str = METRIC,
    plot: Sequence[str] = (),
) -> list[Row]:
    """Write the page about the runs in these folders, and return its table.

    `group_by`: config, run, or keys of the config; `metric`: whose last values are the scores; `plot`: metrics to draw
    beside the usual ones.
    """
    groups = group_runs(load_runs(paths), group_by)
    write_report(groups, out, metric=metric, plot=plot)
    return table(groups, metric)
