"""What the schedules of a config will do, before training: a table, a plot in the terminal, a picture."""

from __future__ import annotations

from pathlib import Path

from rl_training.config import InputError
from rl_training.runtime.controls import Controls

QUARTERS = (0, 25, 50, 75, 100)
COLUMNS = (*(f"{percent}%" for percent in QUARTERS), "min", "max")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


def values_at(controls: Controls, name: str, steps: list[int]) -> list[float]:
    return [getattr(controls.at(step), name) for step in steps]


def table(controls: Controls) -> list[tuple[str, list[float]]]:
    """Every scheduled scalar at 0, 25, 50, 75 and 100 % of the horizon, its least value and its greatest.

    The quarters alone would show a cycle only where it is at rest.
    """
    steps = [round((controls.horizon - 1) * percent / 100) for percent in QUARTERS]
    return [(name, [*values_at(controls, name, steps), *controls.extremes(name)]) for name in controls.varying]


def plot(values: list[float], *, width: int = 60, height: int = 8) -> list[str]:
    """A line chart in braille, `height` lines of `width` characters behind the labels of the axis.

    `values` are spread evenly over the width; two dots fit into a character's width, four into its height.
    """
    low, high = min(values), max(values)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for x in range(columns):
        value = values[round(x * (len(values) - 1) / (columns - 1))]
        y = rows - 1 - round((value - low) / (high - low) * (rows - 1)) if high > low else rows // 2
        for dot in range(min(y, y if previous is None else previous), max(y, y if previous is None else previous) + 1):
            cells[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        previous = y
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    return [f"{labels.get(i, ''):>10} ┤" + "".join(chr(0x2800 + cell) for cell in row) for i, row in enumerate(cells)]


def axis(horizon: int, *, width: int = 60) -> str:
    """The line below a plot: the env steps at its left and right end."""
    end = f"{horizon:,} env steps"
    return f"{'':>12}0{end:>{width - 1}}"


def sampled(controls: Controls, name: str, points: int = 600) -> tuple[list[int], list[float]]:
    last = controls.horizon - 1
    steps = sorted({round(last * i / (points - 1)) for i in range(points)})
    return steps, values_at(controls, name, steps)


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
