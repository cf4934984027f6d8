"""The effects of schedules: warnings, a table, a plot in the terminal, a PNG file."""

from __future__ import annotations

import math
from pathlib import Path

from rl_training.errors import InputError
from rl_training.runtime.controls import Controls, value_at
from rl_training.runtime.hyperparameters import is_given

QUARTERS = (0, 25, 50, 75, 100)
COLUMNS = (*(f"{percent}%" for percent in QUARTERS), "min", "max")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


def scheduled_values(controls: Controls, name: str, steps: list[int]) -> list[float]:
    declared, schedule = controls.declared[name], controls.schedules[name]
    return [value_at(declared, schedule, step, controls.horizon) for step in steps]


def extremes(controls: Controls, name: str) -> tuple[float, float]:
    """The minimum and the maximum of a scalar over the horizon."""
    values = scheduled_values(controls, name, controls.schedules[name].critical_steps(controls.horizon))
    return min(values), max(values)


def schedule_warnings(controls: Controls) -> list[str]:
    """Schedules of the config that change nothing, or do not reach their end: allowed, but probably mistakes."""
    lines = []
    for name in sorted(name for name in controls.varying if is_given(name, controls.kwargs)):
        low, high = extremes(controls, name)
        if math.isclose(low, high, rel_tol=1e-9):
            lines.append(f"{name} is scheduled, but stays {low:g} from the first step to the last: give another end")
        elif (part := controls.schedules[name].overrun(controls.horizon)) is not None:
            (value,) = scheduled_values(controls, name, [controls.horizon - 1])
            lines.append(f"{name}: {part}, the run only {controls.horizon:,}: it comes no further than {value:g}")
    return lines


def idle_learning_rates(controls: Controls, step: int) -> list[str]:
    """The learning rates that are 0 from `step` to the end of the run."""
    schedules, overrides = controls.schedules, controls.overrides
    rates = [name for name in schedules if name.endswith("learning_rate") and name not in overrides]
    idle = [name for name in rates if schedules[name].is_zero_from(step, controls.horizon)]
    return idle + [name for name, value in overrides.items() if name.endswith("learning_rate") and value == 0]


def table(controls: Controls) -> list[tuple[str, list[float]]]:
    """Every scheduled scalar at 0, 25, 50, 75 and 100 % of the horizon, its minimum and its maximum.

    Without these two, a cycle whose period is a quarter of the horizon would seem constant.
    """
    steps = [round((controls.horizon - 1) * percent / 100) for percent in QUARTERS]
    return [(name, [*scheduled_values(controls, name, steps), *extremes(controls, name)]) for name in controls.varying]


def plot(values: list[float], *, width: int = 60, height: int = 9) -> list[str]:
    """A line chart of evenly spaced values in braille: `height` lines of `width` characters right of a labelled axis.

    A character is two dots wide and four dots high.
    """
    low, high = min(values), max(values)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for x in range(columns):
        value = values[round(x * (len(values) - 1) / (columns - 1))]
        y = rows - 1 - round((value - low) / (high - low) * (rows - 1)) if high > low else rows // 2
        previous = y if previous is None else previous
        for dot in range(min(y, previous), max(y, previous) + 1):
            cells[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        previous = y
    labels = y_labels(low, high, height)
    return [labels[line] + "".join(chr(0x2800 + cell) for cell in row) for line, row in enumerate(cells)]


def y_labels(low: float, high: float, height: int) -> list[str]:
    """The left axis: in every second line, and in the first and the last, the value at its middle."""
    lines = []
    for line in range(height):
        share = 1 - line / (height - 1) if height > 1 else 1.0
        marked = line in (0, height - 1) or (line % 2 == 0 and line < height - 2)
        value = high if line == 0 else low + share * (high - low)
        lines.append(f"{value:>10.4g} ┤" if marked and (high > low or line == 0) else f"{'':>10} │")
    return lines


def axis(horizon: int, *, width: int = 60, ticks: int = 4) -> str:
    """The axis below a plot: env steps at both ends and between them."""
    places = [round(tick * (width - 1) / ticks) for tick in range(ticks + 1)]
    line = "".join("┬" if place in places else "─" for place in range(width))
    marks = [f"{round(tick * horizon / ticks):,}" for tick in range(ticks + 1)]
    texts = ""
    for place, mark in zip(places, marks, strict=True):
        start = max(len(texts) + 1 if texts else 0, min(place - len(mark) // 2, width - len(mark)))
        texts = texts.ljust(max(0, start)) + mark
    return f"{'':>10} └{line}\n{'':>12}{texts} env steps"


def sampled(controls: Controls, name: str, points: int = 600) -> tuple[list[int], list[float]]:
    last = controls.horizon - 1
    steps = sorted({round(last * i / (points - 1)) for i in range(points)})
    return steps, scheduled_values(controls, name, steps)


def save_png(controls: Controls, path: Path) -> None:
    """One panel per scheduled scalar, over the env steps of the run."""
    try:
        import matplotlib
    except ImportError:
        raise InputError('--png needs matplotlib: pip install "rl-training[plot]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(controls.varying)
    if not names:
        raise InputError("nothing is scheduled in this config, so there is nothing to draw")
    figure, axes = pyplot.subplots(len(names), 1, figsize=(7, 1.8 * len(names)), sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        axis.plot(*sampled(controls, name), linewidth=1.8)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        axis.margins(x=0.01)
    axes[-1, 0].set_xlabel("env steps")
    axes[-1, 0].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"--png {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        pyplot.close(figure)
