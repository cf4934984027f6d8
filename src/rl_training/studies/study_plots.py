"""Optuna's plots of a study as SVG, which a page shows without scripts or a network."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from rl_training.runtime.number_text import number

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 40  # margins around the axes
BAR = 24  # height of a row of importances
NAMES = 220  # width of the names beside the bars
MOST_TRIALS = 12  # rows of the table
AXIS = 110  # width between two axes of the parallel coordinates
STYLE = """<style>
.study svg { display: block; width: 100%; min-width: 600px; max-width: 900px; height: auto; }
.study svg { font: 12px system-ui, sans-serif; }
.study text { fill: currentColor; }
.study .axis { stroke: currentColor; opacity: .35; }
.study .best { stroke: #d9622b; fill: none; stroke-width: 2; }
.study .complete { fill: #2f6fb0; }
.study .pruned { fill: none; stroke: #888; }
.study .failed { stroke: #c0392b; stroke-width: 2; }
.study .curve { fill: none; stroke: #2f6fb0; opacity: .45; }
.study .curve.cut { stroke: #888; stroke-dasharray: 3 3; }
.study .bar { fill: #2f6fb0; }
.study .line { fill: none; stroke-width: 1.5; opacity: .75; }
.study .line:hover, .study .curve:hover { stroke-width: 4; opacity: 1; }
.study .scroll { overflow-x: auto; }
.study table { border-collapse: collapse; font: 13px system-ui, sans-serif; }
.study td, .study th { padding: 2px 10px 2px 0; text-align: left; white-space: nowrap; }
</style>"""


@dataclass(frozen=True)
class Scale:
    """From a value to a place on an axis."""

    low: float
    high: float
    start: float  # pixels
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, five at about the same distance."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            powers = [10.0**power for power in range(first, last + 1)]
            return powers if len(powers) > 1 else [self.low, self.high]
        if not self.high > self.low:
            return [self.low]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def study_section(study: optuna.Study, metric: str) -> str:
    """The part of a page about a study, as HTML."""
    trials = study.get_trials(deepcopy=False)
    plots = {
        "Trials": history(trials, study.direction, metric),
        "Importance of the parameters (PED-ANOVA)": importance_bars(importances(study)),
        "Parallel coordinates of the complete trials": parallel(trials, study.direction, metric),
        "During training": curves(trials, metric),
        "Best trials": trial_table(trials, study.direction),
    }
    parts = [
        f"<h2>{html.escape(title)}</h2>\n<div class='scroll'>{plot}</div>" for title, plot in plots.items() if plot
    ]
    return "\n".join([STYLE, "<section class='study'>", *parts, "</section>", "<h2>Runs of the best trials</h2>"])


def ranked(trials: Sequence[FrozenTrial], direction: str) -> list[FrozenTrial]:
    """The complete trials, the best first."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return sorted(complete, key=lambda trial: float(trial.value or 0), reverse=direction == "maximize")


def importances(study: optuna.Study) -> dict[str, float]:
    """By parameter, in falling order; none with fewer than two complete trials, or if all have the same value."""
    complete = [trial for trial in study.get_trials(deepcopy=False) if trial.state == TrialState.COMPLETE]
    if len({trial.value for trial in complete}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a parameter that few trials have
        try:
            found: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
        except (ValueError, RuntimeError):  # no parameter is in all trials
            return {}
    return found


def last_value(trial: FrozenTrial) -> float | None:
    """The value of a trial, or for one that was pruned its last report."""
    value: float | None = trial.value
    if value is None and trial.intermediate_values:
        value = trial.intermediate_values[max(trial.intermediate_values)]
    return value


def history(trials: Sequence[FrozenTrial], direction: Any, metric: str) -> str:
    """The value of each trial, and the best so far."""
    values = [value for trial in trials if (value := last_value(trial)) is not None]
    if not values:
        return ""
    x, y = axes(-0.5, len(trials) - 0.5, values)
    better: Callable[[float, float], float] = max if direction.name == "MAXIMIZE" else min
    best: float | None = None
    points, marks = [], []
    for trial in trials:
        value = last_value(trial)
        if trial.state == TrialState.COMPLETE and value is not None:
            best = value if best is None else better(best, value)
            points.append((x(trial.number), y(best)))
        marks.append(mark(trial, x(trial.number), y(value) if value is not None else HEIGHT - BOTTOM, metric))
    line = f"<path class='best' d='{steps_path(points)}'/>" if points else ""
    return svg(WIDTH, HEIGHT, [*frame(x, y, "trial", metric), line, *marks])


def mark(trial: FrozenTrial, x: float, y: float, metric: str) -> str:
    title = f"<title>{html.escape(described(trial, metric))}</title>"
    if trial.state == TrialState.COMPLETE:
        return f"<circle class='complete' cx='{x:.1f}' cy='{y:.1f}' r='4'>{title}</circle>"
    if trial.state == TrialState.FAIL:
        cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8M{x - 4:.1f} {y + 4:.1f}l8 -8"
        return f"<path class='failed' d='{cross}'>{title}</path>"
    return f"<circle class='pruned' cx='{x:.1f}' cy='{y:.1f}' r='4'>{title}</circle>"


def described(trial: FrozenTrial, metric: str) -> str:
    value = last_value(trial)
    score = "" if value is None else f", {metric} {number(value)}"
    params = "".join(f"\n{name} {shown(each)}" for name, each in trial.params.items())
    return f"trial {trial.number}: {trial.state.name.lower()}{score}{params}"


def shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def curves(trials: Sequence[FrozenTrial], metric: str) -> str:
    """What the trials reported during training."""
    reported = [trial for trial in trials if len(trial.intermediate_values) > 1]
    if not reported:
        return ""
    values = [value for trial in reported for value in trial.intermediate_values.values() if math.isfinite(value)]
    x, y = axes(0, max(max(trial.intermediate_values) for trial in reported), values)
    lines = []
    for trial in reported:
        points = [(x(step), y(value)) for step, value in sorted(trial.intermediate_values.items())]
        cut = " cut" if trial.state == TrialState.PRUNED else ""
        title = f"<title>{html.escape(described(trial, metric))}</title>"
        lines.append(f"<path class='curve{cut}' d='{path(points)}'>{title}</path>")
    return svg(WIDTH, HEIGHT, [*frame(x, y, "env steps of all seeds", metric), *lines])


def importance_bars(found: dict[str, float]) -> str:
    if not found:
        return ""
    most = max(found.values()) or 1.0
    rows = []
    for row, (name, share) in enumerate(found.items()):
        top, width = row * BAR, (WIDTH - NAMES - 60) * share / most
        rows.append(f"<text x='{NAMES - 8}' y='{top + 16}' text-anchor='end'>{html.escape(short(name))}</text>")
        rows.append(f"<rect class='bar' x='{NAMES}' y='{top + 4}' width='{width:.1f}' height='{BAR - 8}'/>")
        rows.append(f"<text x='{NAMES + width + 6:.1f}' y='{top + 16}'>{share:.2f}</text>")
    return svg(WIDTH, BAR * len(found), rows)


def parallel(trials: Sequence[FrozenTrial], direction: Any, metric: str) -> str:
    """A line for each complete trial through its parameters and its value, which colours it."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if len(complete) < 2:
        return ""
    distributions: dict[str, BaseDistribution] = {}
    for trial in complete:
        distributions |= trial.distributions
    names = sorted(distributions)
    width = LEFT + AXIS * len(names) + LEFT
    xs = [LEFT + AXIS * i for i in range(len(names) + 1)]
    ys = [param_scale(distributions[name]) for name in names]
    values = [float(trial.value) for trial in complete if trial.value is not None]
    end = Scale(min(values), max(values), HEIGHT - BOTTOM, TOP)
    shapes = []
    for i, name in enumerate(names):
        shapes += axis_at(xs[i], short(name), param_ticks(distributions[name], ys[i]), low=i % 2)
    shapes += axis_at(xs[-1], metric, [(end(tick), number(tick)) for tick in end.ticks()], low=len(names) % 2)
    for trial in sorted(complete, key=lambda trial: float(trial.value or 0), reverse=direction.name == "MINIMIZE"):
        points = [
            (x, place(distributions[name], y, trial.params[name]))
            for x, y, name in zip(xs, ys, names, strict=False)
            if name in trial.params
        ]
        value = float(trial.value or 0)
        share = Scale(min(values), max(values), 0.0, 1.0)(value)
        colour = f"hsl({220 - 200 * (share if direction.name == 'MAXIMIZE' else 1 - share):.0f} 70% 50%)"
        line = path([*points, (xs[-1], end(value))])
        title = f"<title>{html.escape(described(trial, metric))}</title>"
        shapes.append(f"<path class='line' stroke='{colour}' d='{line}'>{title}</path>")
    return svg(width, HEIGHT, shapes)


def param_scale(distribution: Any) -> Scale:
    if isinstance(distribution, CategoricalDistribution):
        return Scale(0, len(distribution.choices) - 1, HEIGHT - BOTTOM, TOP)
    return Scale(distribution.low, distribution.high, HEIGHT - BOTTOM, TOP, distribution.log)


def place(distribution: Any, scale: Scale, value: Any) -> float:
    if isinstance(distribution, CategoricalDistribution):
        return scale(int(distribution.to_internal_repr(value)))
    return scale(value)


def param_ticks(distribution: Any, scale: Scale) -> list[tuple[float, str]]:
    if isinstance(distribution, CategoricalDistribution):
        return [(scale(i), str(choice)) for i, choice in enumerate(distribution.choices)]
    return [(scale(tick), number(tick)) for tick in scale.ticks()]


def axis_at(x: float, name: str, ticks: Iterable[tuple[float, str]], *, low: int) -> list[str]:
    """A vertical axis with its name below; every second name stands lower, so that they do not touch."""
    labels = [f"<text x='{x + 4:.1f}' y='{y + 4:.1f}'>{html.escape(text[:14])}</text>" for y, text in ticks]
    below = HEIGHT - BOTTOM + 18 + 14 * low
    title = f"<text x='{x:.1f}' y='{below}' text-anchor='middle' font-weight='600'>{html.escape(name)}</text>"
    return [f"<path class='axis' d='M{x:.1f} {TOP}V{HEIGHT - BOTTOM}'/>", *labels, title]


def trial_table(trials: Sequence[FrozenTrial], direction: Any) -> str:
    """The best trials with their parameters, then what failed."""
    complete = ranked(trials, direction.name.lower())
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    names = sorted({name for trial in complete[:MOST_TRIALS] for name in trial.params})
    rows = [["trial", "value", "of each seed", *map(short, names)]]
    for trial in complete[:MOST_TRIALS]:
        seeds = ", ".join(map(number, trial.user_attrs.get("scores", [])))
        params = [shown(trial.params[name]) if name in trial.params else "" for name in names]
        rows.append([str(trial.number), number(trial.value), seeds, *params])
    texts = [row_html(row, "th" if i == 0 else "td") for i, row in enumerate(rows)] if complete else []
    for trial in failed:
        error = str(trial.user_attrs.get("error", "failed")).splitlines()[0]
        texts.append(f"<tr><td>{trial.number}</td><td colspan='{len(names) + 2}'>{html.escape(error)}</td></tr>")
    return f"<table>{''.join(texts)}</table>" if texts else ""


def row_html(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def short(name: str) -> str:
    return name.removeprefix("algo_kwargs.")


def axes(low: float, high: float, values: Sequence[float]) -> tuple[Scale, Scale]:
    pad = 0.04 * (max(values) - min(values))
    y = Scale(min(values) - pad, max(values) + pad, HEIGHT - BOTTOM, TOP)
    return Scale(low, high, LEFT, WIDTH - RIGHT), y


def frame(x: Scale, y: Scale, below: str, beside: str) -> list[str]:
    """Axes with ticks and names."""
    bottom, middle = HEIGHT - BOTTOM, (x.start + x.end) / 2
    shapes = [f"<path class='axis' fill='none' d='M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}'/>"]
    for tick in x.ticks():
        if tick % 1:
            continue  # trials and steps are whole numbers
        shapes.append(f"<text x='{x(tick):.1f}' y='{bottom + 16}' text-anchor='middle'>{tick:,.6g}</text>")
    for tick in y.ticks():
        shapes.append(f"<text x='{LEFT - 6}' y='{y(tick) + 4:.1f}' text-anchor='end'>{number(tick)}</text>")
    shapes.append(f"<text x='{middle:.0f}' y='{HEIGHT - 6}' text-anchor='middle'>{html.escape(below)}</text>")
    shapes.append(f"<text x='{LEFT + 6}' y='{TOP + 4}'>{html.escape(beside)}</text>")
    return shapes


def path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def steps_path(points: Sequence[tuple[float, float]]) -> str:
    """Along the first point's height to the second, and so on."""
    first, *rest = points
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)


def svg(width: float, height: float, shapes: Iterable[str]) -> str:
    return f"<svg viewBox='0 0 {width:.0f} {height:.0f}' role='img'>{''.join(shapes)}</svg>"
