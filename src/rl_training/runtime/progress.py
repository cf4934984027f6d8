"""What a run shows while it trains: a live display on a terminal, aligned lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, TextIO

from rl_training.config import InputError
from rl_training.runtime.metrics import is_loss, of_task
from rl_training.types import Metrics

REFRESH_SECONDS = 1.0  # a drawing takes about 7 ms: below 1 % of the time
SPEED_WINDOW = 30.0  # seconds over which steps per second are measured
MAX_ROWS = 8  # in a column of the live display
LINE_CELLS = 2  # of a group in a plain line
TASK_RETURN = of_task("train_return_mean", "")  # beginning of the metrics that the tasks of a run have
RETURNS = {"train": "train_return_mean", "eval": "eval_return_mean"}


class LastingStream:
    """A stream whose end does not end the run: once nobody reads it any more, what is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lost = stream, False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        if not self._lost:
            try:
                action()
            except OSError:  # the terminal or pipe is gone
                self._lost = True
            except ValueError:
                if not self._stream.closed:
                    raise
                self._lost = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """The silent one, and what the others share: the clock, the speed, the last metrics."""

    def __init__(self, *, schedule_names: Collection[str] = (), stream: TextIO | None = None) -> None:
        self.schedule_names = tuple(schedule_names)
        self.stream: Any = LastingStream(stream if stream is not None else sys.stdout)
        self.title, self.total, self.step = "", 0, 0
        self.metrics: Metrics = {}
        self._started = time.monotonic()
        self._marks = deque([(self._started, 0)])

    def start(self, total: int, title: str, step: int = 0) -> None:
        """`step`: where a resumed run begins."""
        self.total, self.title, self.step = total, title, step
        self._started = time.monotonic()
        self._marks = deque([(self._started, step)])

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Tell the step, as often as you like; `metrics` come once per log interval."""
        self.step = step
        if metrics is not None:
            self.metrics.update(metrics)

    def message(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def speed(self) -> float:
        """Steps per second of late; 0 before the first step."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self.step))
        while len(self._marks) > 2 and now - self._marks[0][0] > SPEED_WINDOW:
            self._marks.popleft()
        since, step = self._marks[0]
        return (self.step - step) / (now - since) if now > since else 0.0

    def time_left(self, speed: float) -> float | None:
        return max(0, self.total - self.step) / speed if speed > 0 else None

    def groups(self) -> dict[str, dict[str, float]]:
        """The metrics that are shown, by column."""
        shown = {
            "return": {name: self.metrics.get(key, math.nan) for name, key in RETURNS.items()},
            "task": {
                name.removeprefix(TASK_RETURN): value
                for name, value in self.metrics.items()
                if name.startswith(TASK_RETURN)
            },
            "loss": {name: value for name, value in self.metrics.items() if is_loss(name)},
            "schedule": {name: self.metrics[name] for name in self.schedule_names if name in self.metrics},
        }
        return {group: values for group, values in shown.items() if values}


class PlainProgress(Progress):
    """One line per log interval; columns stay in place as long as the metrics do."""

    def start(self, total: int, title: str, step: int = 0) -> None:
        super().start(total, title, step)
        print(title, file=self.stream, flush=True)

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        super().update(step, metrics)
        if metrics is not None:
            print(self._line(), file=self.stream, flush=True)

    def message(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # from a signal handler that came in the middle of a print
            print(text, file=self.stream, flush=True)

    def _line(self) -> str:
        width, speed = len(f"{self.total:,}"), self.speed()
        counts = f"{self.step:>{width},}/{self.total:,} {percent(self.step, self.total):>4}"
        parts = [counts, f"{speed:>7,.0f} steps/s", f"{duration(self.time_left(speed)):>7} left"]
        for group, values in self.groups().items():
            cells = [f"{short(group, name)} {number(value):>9}" for name, value in list(values.items())[:LINE_CELLS]]
            parts.append(" ".join([group, *cells]))
        return "  ".join(parts)


class LiveProgress(Progress):
    """A bar and a table that are redrawn in place, at most once a second and without a thread."""

    def __init__(self, *, schedule_names: Collection[str] = (), stream: TextIO | None = None) -> None:
        super().__init__(schedule_names=schedule_names, stream=stream)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self.stream, force_terminal=True)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._render)
        self._drawn = 0.0

    def start(self, total: int, title: str, step: int = 0) -> None:
        super().start(total, title, step)
        self._live.start(refresh=True)

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        super().update(step, metrics)
        now = time.monotonic()
        if now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            self._live.refresh()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        if self._live.is_started:
            self._live.refresh()
            self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        speed = self.speed()
        counts = Text(f"{self.step:,}/{self.total:,} {percent(self.step, self.total)}")
        clock = f"{speed:,.0f} steps/s  {duration(self.elapsed)} < {duration(self.time_left(speed))}"
        bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(ProgressBar(total=max(1, self.total), completed=self.step), counts, Text(clock, style="cyan"))
        columns = Table.grid(padding=(0, 3, 0, 0))
        columns.add_row(*(_column(group, values) for group, values in self.groups().items()))
        heading = Text(self.title, style="bold", no_wrap=True, overflow="ellipsis")
        return Group(heading, bar, columns) if self.metrics else Group(heading, bar)


def _column(group: str, values: Mapping[str, float]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=20)
    table.add_column(no_wrap=True, justify="right", min_width=8)
    table.add_row(Text(group, style="dim"), "")
    for name, value in list(values.items())[:MAX_ROWS]:
        table.add_row(Text(short(group, name)), Text(number(value), style="green"))
    if len(values) > MAX_ROWS:
        table.add_row(Text(f"and {len(values) - MAX_ROWS} more", style="dim"), "")
    return table


def make_progress(
    mode: str = "auto", *, schedule_names: Collection[str] = (), stream: TextIO | None = None
) -> Progress:
    """auto, live, plain or silent. `schedule_names`: the hyperparameters whose value in force is shown."""
    stream = stream if stream is not None else sys.stdout
    if mode == "auto":
        mode = "live" if _can_redraw(stream) else "plain"
    kinds: dict[str, type[Progress]] = {"live": LiveProgress, "plain": PlainProgress, "silent": Progress}
    if mode not in kinds:
        raise InputError(f"progress must be one of auto, {', '.join(kinds)}, got {mode!r}")
    return kinds[mode](schedule_names=schedule_names, stream=stream)


def _can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def summary(
    title: str,
    facts: Mapping[str, str | None],
    commands: Mapping[str, str] | None = None,
    *,
    stream: TextIO | None = None,
) -> None:
    """The end of a run: what came out and where it lies, then what to type next. Lines are never folded, so that
    paths and commands can be copied."""
    stream = stream if stream is not None else sys.stdout
    known = {name: text for name, text in facts.items() if text is not None}
    commands = commands or {}
    width = max((len(name) for name in [*known, *commands]), default=0)
    lines = ["", title, *(f"  {name:<{width}}  {text}" for name, text in known.items())]
    if commands:
        lines += ["", "Next:", *(f"  {name:<{width}}  {command}" for name, command in commands.items())]
    print("\n".join(lines), file=LastingStream(stream), flush=True)


def number(value: float | None) -> str:
    """At most nine characters with four digits that count; None is a hyperparameter that is switched off."""
    if value is None:
        return "off"
    if math.isnan(value):
        return "-"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1e5 else f"{value:,.1f}" if size >= 1e3 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    if seconds is None or seconds >= 360_000_000:
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"


def percent(step: int, total: int) -> str:
    return f"{min(100, 100 * step // max(1, total))}%"


def short(group: str, name: str) -> str:
    """`policy_loss` under the heading `loss` is `policy`."""
    return (name.removesuffix("_loss").removeprefix("loss_") or name) if group == "loss" else name
