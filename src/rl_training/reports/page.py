"""The report as one HTML file, which needs no network: curves, their controls, and the tables."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.errors import InputError
from rl_training.reports.bands import Band, band_of, places
from rl_training.reports.groups import Group, env_of
from rl_training.reports.runs import Run, is_number
from rl_training.reports.table import HEADINGS, METRIC, Row, cells, score_text, table
from rl_training.runtime.atomic_files import write_text_atomic
from rl_training.runtime.metadata import package_version
from rl_training.runtime.number_text import duration

POINTS = 250  # of a curve
DIGITS = 5  # of a value
FIRST = (METRIC, "train_return_mean")  # panels, where the runs have them, in this order; then those that begin so:
THEN = ("eval_success", "train_success", "eval_win", "eval_info_", "train_info_", f"{METRIC}/", "train_return_mean/")
TITLES = {
    METRIC: "Evaluation: mean return",
    "train_return_mean": "Training: mean return of the last 100 episodes",
    "eval_success_rate": "Evaluation: success rate",
    "train_success_rate": "Training: success rate",
    "eval_win_rate": "Evaluation: games won",
}


def write_report(
    groups: Sequence[Group],
    path: str | Path,
    *,
    metric: str = METRIC,
    plot: Sequence[str] = (),
    title: str = "",
    section: str = "",
) -> Path:
    """Write the page. `metric`: whose last values the table is about; `plot`: metrics to draw beside the usual ones;
    `title`: in place of one about the groups; `section`: HTML to show above the table."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_text_atomic(path, page(groups, metric=metric, plot=plot, title=title, section=section))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def page(
    groups: Sequence[Group], *, metric: str = METRIC, plot: Sequence[str] = (), title: str = "", section: str = ""
) -> str:
    """The text of the HTML file."""
    title = title or title_of(groups)
    data = json.dumps({"title": title, **payload(groups, metric, plot)}, separators=(",", ":"), allow_nan=False)
    text = static("report.html")
    parts = {
        "title": html.escape(title),
        "style": static("uPlot.min.css") + static("report.css"),
        "licence": static("uPlot.LICENSE"),
        "uplot": static("uPlot.iife.min.js"),
        "data": data.replace("<", "\\u003c"),  # a name may hold </script>
        "script": static("report.js"),
        "section": section,  # last: in it no marks are looked for
    }
    for name, part in parts.items():
        before, mark, after = text.partition(f"{{{{{name}}}}}")
        assert mark, name
        text = before + part + after
    return text


def static(name: str) -> str:
    return (files("rl_training.reports") / "static" / name).read_text(encoding="utf-8")


def title_of(groups: Sequence[Group]) -> str:
    return groups[0].name if len(groups) == 1 else f"{len(groups)} groups of runs"


def payload(groups: Sequence[Group], metric: str, plot: Sequence[str]) -> dict[str, Any]:
    """What the script of the page draws."""
    runs = [run for group in groups for run in group.runs]
    schedules = varying_hyperparameters(runs)
    names = panels_of(runs, [metric, *plot])
    return {
        "made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "version": package_version() or "unknown",
        "panels": [{"name": name, "title": TITLES.get(name, name)} for name in names]
        + [{"name": name, "title": f"Schedule: {name}", "schedule": True} for name in schedules],
        "groups": [group_data(group, names, schedules) for group in groups],
        "table": {"headings": [*HEADINGS, *MORE], "rows": [row_data(row) for row in table(groups, metric)]},
        "runs": {"headings": list(RUN_HEADINGS), "rows": [run_row(run, metric) for run in runs]},
        "metric": metric,
    }


def panels_of(runs: Sequence[Run], asked: Iterable[str]) -> list[str]:
    """The metrics to draw, without those that no run has; one that was asked for must be there."""
    known = dict.fromkeys(name for run in runs for kind in ("eval", "train") for name in run.metrics(kind))
    for name in asked:
        if name not in known and name != METRIC:
            raise InputError(f"no run has the metric {name!r}; there are {', '.join(sorted(known))}")
    usual = [*FIRST, *(name for prefix in THEN for name in known if name.startswith(prefix))]
    wanted = dict.fromkeys([*usual[:2], *asked, *usual[2:]])
    return [name for name in wanted if name in known and any(len(run.curve(name).steps) for run in runs)]


def varying_hyperparameters(runs: Sequence[Run]) -> list[str]:
    """Those whose value in the log of a run is not always the same: scheduled, learned or written by a callback."""
    found: dict[str, None] = {}
    for run in runs:
        for name in run.config.get("algo_kwargs") or {}:
            values = run.curve(name).values
            if len(values) and values.min() != values.max():
                found[name] = None
    return list(found)


def group_data(group: Group, names: Sequence[str], schedules: Sequence[str]) -> dict[str, Any]:
    runs = group.runs
    return {
        "name": group.name,
        "runs": [run_data(run, runs, names, schedules) for run in runs],
        "bands": {name: bands_of(group, name) for name in names},
    }


def draws(run: Run, runs: Sequence[Run], schedule: str) -> bool:
    """Whether a run of a group is drawn in the panel of a schedule: of those with the same values, the longest is."""
    longest = max(runs, key=lambda each: len(each.curve(schedule).steps))
    own, other = run.curve(schedule), longest.curve(schedule)
    if run is longest or not len(own.steps):
        return run is longest
    return not np.allclose(np.interp(own.steps, other.steps, other.values), own.values, rtol=1e-3, atol=1e-9)


def run_data(run: Run, runs: Sequence[Run], metrics: Sequence[str], schedules: Sequence[str]) -> dict[str, Any]:
    """`same`: the schedules whose values another of the group's `runs` has."""
    own = [name for name in schedules if draws(run, runs, name)]
    names = [*metrics, *own]
    evaluated = [name for name in names if name.startswith("eval_")]
    return {
        "name": run.name,
        "seed": run.seed,
        "env": env_of(run),
        "status": run.status,
        "train": columns(run, "train", [name for name in names if name not in evaluated]),
        "eval": columns(run, "eval", evaluated),
        "same": [name for name in schedules if name not in own and len(run.curve(name).steps)],
    }


def columns(run: Run, kind: str, names: Sequence[str]) -> dict[str, Any]:
    """Steps, seconds and metrics of a run's lines of one kind, at most POINTS of each."""
    lines = [line for line in run.lines if line["kind"] == kind]
    lines = [lines[place] for place in places(len(lines), POINTS)]
    return {
        "steps": [line["global_step"] for line in lines],
        "seconds": [rounded(line.get("wall_seconds")) for line in lines],
        "values": {name: [rounded(line.get(name)) for line in lines] for name in names},
    }


def bands_of(group: Group, name: str) -> dict[str, Any]:
    """By axis."""
    curves = [run.curve(name) for run in group.runs]
    found = {"steps": band_of([(curve.steps, curve.values) for curve in curves], group.strata)}
    timed = [np.isfinite(curve.seconds) for curve in curves]
    pairs = [(curve.seconds[own], curve.values[own]) for curve, own in zip(curves, timed, strict=True)]
    found["seconds"] = band_of(pairs, group.strata)
    return {axis: band_data(band) for axis, band in found.items() if band is not None}


def band_data(band: Band) -> dict[str, Any]:
    return {name: [rounded(value) for value in column.tolist()] for name, column in band._asdict().items()}


def rounded(value: Any) -> float | int | None:
    """A number of a few digits; None where there is none."""
    if not is_number(value):
        return None
    short = float(f"{value:.{DIGITS}g}") if value else 0.0
    return int(short) if math.isfinite(short) and short == int(short) else short


MORE = ("differences", "hardware", "versions", "commit")
RUN_HEADINGS = ("run", "score", "seed", "status", "steps", "wall", "folders")


def row_data(row: Row) -> list[str]:
    differences = ", ".join(f"{key} {value}" for key, value in row.differences.items())
    return [*cells(row), differences or "-", row.hardware or "-", row.versions or "-", row.commit or "-"]


def run_row(run: Run, metric: str) -> list[str]:
    folders = " → ".join(str(folder) for folder in run.folders)
    score = score_text(run.score(metric))
    return [run.name, score, str(run.seed), run.status, f"{run.step:,}", duration(run.wall_seconds), folders]
