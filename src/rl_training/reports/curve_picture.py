"""The curves of runs with one config as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rl_training.reports.bands import POINTS, Band, band_of, thinned
from rl_training.reports.groups import Group
from rl_training.reports.table import METRIC

LABELS = {METRIC: "mean return in evaluation", "train_return_mean": "mean return in training"}
ONE, ALL = "#2f6fb0", "#d9622b"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def curve_picture(group: Group) -> bytes | None:
    """A line for each run, and the interquartile mean of several with its interval; None if there is no curve."""
    metric = next((name for name in LABELS if any(len(run.curve(name).steps) > 1 for run in group.runs)), None)
    if metric is None:
        return None
    curves = [run.curve(metric) for run in group.runs]
    pairs = [(curve.steps, curve.values) for curve in curves]
    return drawn(pairs, band_of(pairs, group.strata), LABELS[metric])


def drawn(curves: Sequence[tuple[Any, Any]], band: Band | None, label: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for steps, values in curves:
        alpha, width = (0.4, 1.0) if band is not None else (1.0, 1.8)
        axes.plot(thinned(steps, 4 * POINTS), thinned(values, 4 * POINTS), color=ONE, alpha=alpha, linewidth=width)
    if band is not None:
        axes.fill_between(band.x, band.low, band.high, color=ALL, alpha=0.2, linewidth=0)
        axes.plot(band.x, band.iqm, color=ALL, linewidth=2, label=f"interquartile mean of {len(curves)} runs, 95 %")
        axes.legend(frameon=False)
    axes.set_xlim(left=0)
    axes.set_xlabel("env steps")
    axes.set_ylabel(label)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png", metadata={"Software": None})
    return file.getvalue()
