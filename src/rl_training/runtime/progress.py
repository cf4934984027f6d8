"""The progress display of a run: live on a terminal, aligned lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TextIO, TypeVar

from rl_training.errors import InputError
from rl_training.runtime.metrics import is_loss, is_of_task, of_task
from rl_training.runtime.number_text import duration, number, percent
from rl_training.runtime.phases import Phases, compilation_phase, shares
from rl_training.types import Metrics

T = TypeVar("T")

REFRESH_SECONDS = 1.0  # drawing takes about 7 ms: below 1 % of the time
QUIET_SECONDS = 30.0  # without output, after which plain progress prints a line
SPEED_WINDOW = 30.0  # seconds over which steps per second are measured
PHASE_WINDOW = 5.0  # seconds over which the shares of the phases are measured
LEAST_SHARE = 0.01  # phases with a smaller share of the time are not shown
LEAST_WAIT = 0.05  # where both actors and learner wait for a smaller share of the time, the processor is the limit
MESSAGE_SECONDS = 0.5  # a message waits at most this long for a drawing to end
MAX_ROWS = 8  # in a column of the live display
LINE_CELLS = 2  # of a group in a plain line
TASK_RETURN = of_task("train_return_mean", "")  # prefix of the returns of single tasks
RETURNS = {"train": "train_return_mean", "eval": "eval_return_mean"}
LAST = "train_return_last"  # of the last episode
SUCCESS = {"train": "train_success_rate", "eval": "eval_success_rate"}
ACTORS = {  # of a run whose actors play while the learner learns
    "lag": "policy_lag_mean",
    "largest lag": "policy_lag_max",
    "queue fill": "queue_fill",
    "actor steps/s": "actor_steps_per_second",
    "learner steps/s": "learner_steps_per_second",
    "dropped": "rollouts_dropped",
    "restarts": "actor_restarts",
}

# Held while drawing. A fork waits for it: the new process would inherit the locks of a drawing, but not the thread that
# releases them.
_drawing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


class Mark(NamedTuple):
    """The state of the run at one time."""

    time: float
    step: int
    seconds: Mapping[str, float]  # spent in each phase


class LastingStream:
    """A stream that ignores writes once its terminal or pipe is closed, so that the run does not end with it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lost = stream, False

    def write(self, text: str) -> int:
        try:
            self._try(lambda: self._stream.write(text))
        except UnicodeEncodeError as error:
            known = text.encode(error.encoding, "replace").decode(error.encoding)
            self._try(lambda: self._stream.write(known))
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
    """The silent display, and the base of the others: clock, speed, phases, last metrics.

    The run writes `step` and enters `phases`; a thread calls `tick` once a second, so that the display is also updated
    during a long update.
    """

    ticks = False  # whether `tick` does anything
    latest: Callable[[], Metrics] = staticmethod(dict)  # what changes between log lines: returns

    def __init__(
        self, *, schedule_names: Collection[str] = (), auto_names: Collection[str] = (), stream: TextIO | None = None
    ) -> None:
        self.schedule_names, self.auto_names = tuple(schedule_names), tuple(auto_names)
        self.stream: Any = LastingStream(stream if stream is not None else sys.stdout)
        self.metrics: Metrics = {}
        self._closing = contextlib.ExitStack()
        self._waiting: deque[str] = deque()  # messages
        self._reset(0, "", 0)

    def _reset(self, total: int, title: str, step: int) -> None:
        self.total, self.title, self.step = total, title, step
        self.phases = Phases()
        self._first = Mark(time.monotonic(), step, {})
        self._marks = deque([self._first])

    def start(self, total: int, title: str, step: int = 0) -> None:
        """`step`: where a resumed run begins."""
        self._reset(total, title, step)
        self._closing.enter_context(compilation_phase(self.phases))
        if self.ticks:
            self._start_thread()

    def _start_thread(self) -> None:
        done = threading.Event()

        def tick_until_done() -> None:
            with contextlib.suppress(OSError, ValueError):  # the stream is closed: the next writer raises the error
                while not done.wait(REFRESH_SECONDS):
                    with _drawing:
                        self._show_waiting()
                        self.tick()

        thread = threading.Thread(target=tick_until_done, name="progress", daemon=True)
        thread.start()
        self._closing.callback(thread.join)
        self._closing.callback(done.set)

    def tick(self) -> None:
        """Redraw; called once a second by a separate thread."""

    def update(self, step: int, metrics: Mapping[str, float] | None = None, *, line: bool = True) -> None:
        """Set the step and, once per log interval, the metrics. Without `line`, a message has shown them already."""
        self.step = step
        if metrics is not None:
            self.metrics = {**self.metrics, **metrics}  # a new dict: the thread may be reading the old one

    def message(self, text: str) -> None:
        """Show a message, or leave it to the thread if the display is busy for long: a signal handler that calls this
        may have interrupted a print that the thread waits for."""
        self._waiting.append(text)
        if _drawing.acquire(timeout=MESSAGE_SECONDS):
            try:
                self._show_waiting()
            finally:
                _drawing.release()

    def _show_waiting(self) -> None:
        while self._waiting:
            with contextlib.suppress(RuntimeError):  # a signal handler inside a print cannot print
                self.show(self._waiting.popleft())

    def show(self, text: str) -> None:
        """Print a message."""

    def stop(self) -> None:
        self._closing.close()
        self._show_waiting()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._first.time

    def speed(self) -> float:
        """Recent steps per second; 0 before the first step."""
        now = time.monotonic()
        mark = self._mark(SPEED_WINDOW)
        return (self.step - mark.step) / (now - mark.time) if now > mark.time else 0.0

    def _mark(self, seconds: float) -> Mark:
        """The mark of about so many seconds ago."""
        now = time.monotonic()
        if now - self._marks[-1].time >= 1.0:
            self._marks.append(Mark(now, self.step, self.phases.seconds()))
        while len(self._marks) > 2 and now - self._marks[0].time > SPEED_WINDOW:
            self._marks.popleft()
        return next((mark for mark in reversed(self._marks) if now - mark.time >= seconds), self._marks[0])

    def time_left(self, speed: float) -> float | None:
        return max(0, self.total - self.step) / speed if speed > 0 else None

    def activity(self) -> str:
        """A long phase, `evaluating 0:00:12`, or the shares of short ones: `learning 81%, collecting 19%`."""
        phase, seconds = self.phases.current
        if seconds >= REFRESH_SECONDS:
            return f"{phase} {duration(seconds)}"
        found = shares(self.phases.seconds(), self._mark(PHASE_WINDOW).seconds)
        shown = [f"{name} {share:.0%}" for name, share in found.items() if share >= LEAST_SHARE] or [phase]
        return ", ".join(shown)

    def groups(self) -> dict[str, dict[str, float]]:
        """The metrics to show, by column: those of the last log line, but returns as they are now."""
        metrics = {**self.metrics, **self.latest()}
        shown = {
            "return": {name: metrics.get(key, math.nan) for name, key in RETURNS.items()} | last_cell(metrics),
            "success": {name: metrics[key] for name, key in SUCCESS.items() if key in metrics},
            "task": {
                name.removeprefix(TASK_RETURN): value for name, value in metrics.items() if name.startswith(TASK_RETURN)
            },
            "loss": {name: value for name, value in metrics.items() if is_loss(name) and not is_of_task(name)},
            "schedule": {name: metrics[name] for name in self.schedule_names if name in metrics},
            "auto": {name: metrics[name] for name in self.auto_names if name in metrics},
            "actors": actor_cells(metrics),
        }
        return {group: values for group, values in shown.items() if values}


class PlainProgress(Progress):
    """One line per log interval, with aligned columns, and one after a while without output."""

    ticks = True
    _printed = 0.0  # the time of the last line

    def start(self, total: int, title: str, step: int = 0) -> None:
        self._print(title)
        super().start(total, title, step)

    def update(self, step: int, metrics: Mapping[str, float] | None = None, *, line: bool = True) -> None:
        super().update(step, metrics)
        if metrics is not None and line:
            with _drawing:
                self._print(self._line())

    def tick(self) -> None:
        if time.monotonic() - self._printed >= QUIET_SECONDS:
            self._print(f"{self._counts()}  {self.activity()}")

    def show(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        with _drawing:
            self._printed = time.monotonic()
            print(text, file=self.stream, flush=True)

    def _counts(self) -> str:
        width, speed = len(f"{self.total:,}"), self.speed()
        counts = f"{self.step:>{width},}/{self.total:,} {percent(self.step, self.total):>4}"
        return f"{counts}  {speed:>7,.0f} steps/s  {duration(self.time_left(speed)):>7} left"

    def _line(self) -> str:
        parts = [self._counts()]
        for group, values in self.groups().items():
            cells = [f"{name} {number(value):>9}" for name, value in list(values.items())[:LINE_CELLS]]
            parts.append(" ".join(cells if group == "loss" else [group, *cells]))  # the name of a loss ends with it
        return "  ".join([*parts, *bottleneck(self.metrics)])


class LiveProgress(Progress):
    """A bar and a table that are redrawn in place once a second."""

    ticks = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self.stream, force_terminal=True)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._render)

    def start(self, total: int, title: str, step: int = 0) -> None:
        super().start(total, title, step)
        with _drawing:
            self._live.start(refresh=True)

    def tick(self) -> None:
        if self._live.is_started:
            self._live.refresh()

    def show(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        super().stop()
        if self._live.is_started:
            self.phases.enter("stopped")
            self._marks = deque([self._first])  # the last drawing shows the means of the whole run
            self._live.refresh()
            self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        speed = self.speed()
        counts = Text(f"{self.step:,}/{self.total:,} {percent(self.step, self.total)}")
        left = f"  {duration(self.time_left(speed))} left" if speed else ""
        clock = f"{speed:,.0f} steps/s  {duration(self.elapsed)}{left}"
        bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(ProgressBar(total=max(1, self.total), completed=self.step), counts, Text(clock, style="cyan"))
        columns = Table.grid(padding=(0, 3, 0, 0))
        columns.add_row(*(_column(group, values) for group, values in self.groups().items()))
        heading = Table.grid(expand=True, padding=(0, 1, 0, 0))
        heading.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        heading.add_column(no_wrap=True, justify="right")
        heading.add_row(Text(self.title, style="bold", overflow="ellipsis"), Text(self.activity(), style="cyan"))
        waits = [Text(line, style="cyan") for line in bottleneck(self.metrics)]
        return Group(heading, bar, columns, *waits) if self.metrics or self.latest() else Group(heading, bar)


def _column(group: str, values: Mapping[str, float]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=20)
    table.add_column(no_wrap=True, justify="right", min_width=8)
    table.add_row(Text(group, style="dim"), "")
    for name, value in list(values.items())[:MAX_ROWS]:
        table.add_row(Text(name), Text(number(value), style="green"))
    if len(values) > MAX_ROWS:
        table.add_row(Text(f"and {len(values) - MAX_ROWS} more", style="dim"), "")
    return table


def make_progress(
    mode: str = "auto",
    *,
    schedule_names: Collection[str] = (),
    auto_names: Collection[str] = (),
    stream: TextIO | None = None,
) -> Progress:
    """auto, live, plain or silent. `schedule_names`: the hyperparameters whose value in force is shown; `auto_names`:
    those that the algorithm learns or computes."""
    stream = stream if stream is not None else sys.stdout
    kinds: dict[str, type[Progress]] = {"live": LiveProgress, "plain": PlainProgress, "silent": Progress}
    return kind_of_display(mode, kinds, stream)(schedule_names=schedule_names, auto_names=auto_names, stream=stream)


def kind_of_display(mode: str, kinds: Mapping[str, type[T]], stream: TextIO) -> type[T]:
    """mode: one of `kinds`, or auto: live where the stream can be redrawn, else plain."""
    if mode == "auto":
        mode = "live" if can_redraw(stream) else "plain"
    if mode not in kinds:
        raise InputError(f"progress must be one of auto, {', '.join(kinds)}, got {mode!r}")
    return kinds[mode]


def can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def summary(
    title: str,
    facts: Mapping[str, str | None],
    commands: Mapping[str, str] | None = None,
    *,
    stream: TextIO | None = None,
) -> None:
    """Print the results of a run and the next commands. Lines are not folded, so that paths can be copied."""
    stream = stream if stream is not None else sys.stdout
    known = {name: text for name, text in facts.items() if text is not None}
    commands = commands or {}
    width = max((len(name) for name in [*known, *commands]), default=0)
    lines = ["", title, *(f"  {name:<{width}}  {text}" for name, text in known.items())]
    if commands:
        lines += ["", "Next:", *(f"  {name:<{width}}  {command}" for name, command in commands.items())]
    print("\n".join(lines), file=LastingStream(stream), flush=True)


def last_cell(metrics: Metrics) -> Metrics:
    return {"last": metrics[LAST]} if LAST in metrics else {}


def actor_cells(metrics: Metrics) -> Metrics:
    """Of actors elsewhere, and of those in this process that are made to lag."""
    lags = metrics.get("policy_lag_max", 0.0) > 0
    return {name: metrics[key] for name, key in ACTORS.items() if key in metrics and (lags or is_asynchronous(metrics))}


def is_asynchronous(metrics: Metrics) -> bool:
    """Whether actors play while the learner learns."""
    return "actor_waiting" in metrics


def bottleneck(metrics: Metrics) -> list[str]:
    """A line: the side that the other waits for, and the share of its time for which each waits."""
    if not is_asynchronous(metrics):
        return []
    actors, learner = metrics["actor_waiting"], metrics["learner_waiting"]
    side = "neither" if max(actors, learner) < LEAST_WAIT else "learner" if actors > learner else "actors"
    return [f"bottleneck: {side} (actors wait {actors:.0%}, learner {learner:.0%})"]
