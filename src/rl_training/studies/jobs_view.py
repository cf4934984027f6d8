"""What is shown of many jobs: a table that is redrawn on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TextIO

from rl_training.runtime.number_text import duration, number, percent
from rl_training.runtime.progress import LastingStream, kind_of_display
from rl_training.studies.jobs import Job, Outcome
from rl_training.types import Metrics

REFRESH_SECONDS = 1.0
QUIET_SECONDS = 30.0  # without output, after which a line about the jobs under way is printed
MOST_ENDED = 12  # rows of jobs that have ended; running ones are all shown


@dataclass
class JobRow:
    job: Job
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    total: int = 0
    metrics: Metrics = field(default_factory=dict)
    outcome: Outcome | None = None

    @property
    def state(self) -> str:
        if self.outcome is not None:
            return describe(self.outcome)
        return "training" if self.step else "starting"

    @property
    def seconds(self) -> float:
        return self.outcome.seconds if self.outcome else time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        speed = self.metrics.get("steps_per_second", 0.0)
        return None if self.outcome or not speed else max(0, self.total - self.step) / speed


def describe(outcome: Outcome) -> str:
    """`finished`, `stopped: ...` or `failed: ...` in one line."""
    if outcome.status == "failed":
        return f"failed: {(outcome.error or 'unknown').splitlines()[0]}"
    return f"stopped: {outcome.reason}" if outcome.reason else outcome.status


class SilentView:
    """The base of the others: it keeps the rows of jobs, by their folders."""

    def __init__(self, title: str, total: int | None, stream: TextIO) -> None:
        self.title, self.total, self.stream = title, total, LastingStream(stream)
        self.rows: dict[str, JobRow] = {}
        self.kept = 0  # jobs that had finished before
        self.opened = time.monotonic()

    def started(self, job: Job) -> None:
        self.rows[str(job.folder)] = JobRow(job, total=int(job.config["total_timesteps"]))

    def progress(self, job: Job, step: int, total: int, metrics: Metrics) -> None:
        row = self.rows[str(job.folder)]
        row.step, row.total, row.metrics = step, total, row.metrics | metrics

    def ended(self, job: Job, outcome: Outcome) -> None:
        row = self.rows[str(job.folder)]
        row.outcome, row.metrics = outcome, row.metrics | outcome.metrics
        row.step = int(outcome.metrics.get("global_step", row.step))

    def message(self, text: str) -> None:
        """Show a line."""

    def tick(self) -> None:
        """Called about 20 times a second."""

    def close(self) -> None:
        """The last drawing."""

    def counts(self) -> str:
        """`2 running, 5 finished, 1 failed of 10`."""
        states = Counter(row.outcome.status if row.outcome else "running" for row in self.rows.values())
        states["finished"] += self.kept
        named = ("running", "finished", "failed", "interrupted")
        parts = [f"{states[name]} {name}" for name in named if states[name]]
        return (", ".join(parts) or "0 started") + (f" of {self.total}" if self.total else "")


class PlainView(SilentView):
    """A line when a job starts, is evaluated and ends."""

    def __init__(self, title: str, total: int | None, stream: TextIO) -> None:
        super().__init__(title, total, stream)
        self.printed = time.monotonic()
        self.message(title)

    def message(self, text: str) -> None:
        self.printed = time.monotonic()
        print(text, file=self.stream, flush=True)  # type: ignore[call-overload]

    def started(self, job: Job) -> None:
        super().started(job)
        self.message(f"{job.name}: started")

    def progress(self, job: Job, step: int, total: int, metrics: Metrics) -> None:
        before = self.rows[str(job.folder)].metrics.get("eval_return_mean")
        super().progress(job, step, total, metrics)
        if metrics.get("eval_return_mean", before) != before:
            self.message(f"{job.name}: {percent(step, total)}, evaluated {number(metrics['eval_return_mean'])}")

    def ended(self, job: Job, outcome: Outcome) -> None:
        super().ended(job, outcome)
        score = outcome.metrics.get("eval_return_mean")
        parts = [describe(outcome), *([f"evaluated {number(score)}"] if score is not None else [])]
        self.message(f"{job.name}: {', '.join(parts)} in {duration(outcome.seconds)} ({self.counts()})")

    def tick(self) -> None:
        if time.monotonic() - self.printed > QUIET_SECONDS:
            running = [row for row in self.rows.values() if row.outcome is None]
            each = [f"{row.job.name} {percent(row.step, row.total) if row.total else 'starting'}" for row in running]
            self.message(f"{self.counts()}: {', '.join(each)}")


class LiveView(SilentView):
    """A table of the running jobs and those that ended last."""

    def __init__(self, title: str, total: int | None, stream: TextIO) -> None:
        super().__init__(title, total, stream)
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=self.stream, force_terminal=True)  # type: ignore[arg-type]
        self.live = Live(console=self.console, auto_refresh=False, get_renderable=self.table)
        self.live.start(refresh=True)
        self.drawn = time.monotonic()

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def tick(self) -> None:
        if time.monotonic() - self.drawn > REFRESH_SECONDS:
            self.drawn = time.monotonic()
            self.live.refresh()

    def close(self) -> None:
        self.live.refresh()
        self.live.stop()

    def table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        title = f"{self.title}: {self.counts()}, {duration(time.monotonic() - self.opened)}"
        table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, expand=False)
        for name, side in (("job", "left"), ("state", "left"), ("done", "right"), ("steps/s", "right"),
                           ("return", "right"), ("eval", "right"), ("time", "right"), ("left", "right")):  # fmt: skip
            table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
        for row in self.shown():
            shown = row.metrics
            style = {"failed": "red", "finished": "green", "interrupted": "yellow"}
            state = Text(row.state, style=style.get(row.outcome.status, "") if row.outcome else "cyan")
            numbers = (shown.get(name) for name in ("steps_per_second", "train_return_mean", "eval_return_mean"))
            cells = [number(value) if value is not None else "-" for value in numbers]
            done = percent(row.step, row.total) if row.total else "-"
            table.add_row(Text(row.job.name), state, done, *cells, duration(row.seconds), duration(row.left))
        return table

    def shown(self) -> list[JobRow]:
        rows = list(self.rows.values())
        ended = [row for row in rows if row.outcome is not None][-MOST_ENDED:]
        return [*ended, *(row for row in rows if row.outcome is None)]


def make_view(mode: str, title: str, total: int | None, stream: TextIO | None = None) -> SilentView:
    """auto, live, plain or silent. `total`: the number of jobs, if it is known."""
    stream = stream if stream is not None else sys.stdout
    kinds: dict[str, type[SilentView]] = {"live": LiveView, "plain": PlainView, "silent": SilentView}
    return kind_of_display(mode, kinds, stream)(title, total, stream)
