"""The phases of a run: collecting, learning, compiling, evaluating, saving."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any


class Phases:
    """A clock for each phase. One thread enters phases, another may read the clocks at any time."""

    def __init__(self) -> None:
        self._current = ("starting", time.monotonic())  # one tuple, so that a reader sees both or none of a change
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> str:
        """Begin `phase` and return the one that ends; loops call this at every step."""
        before, began = self._current
        if phase != before:
            now = time.monotonic()
            self._seconds[before] = self._seconds.get(before, 0.0) + now - began
            self._current = (phase, now)
        return before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter `phase`, then return to the one before."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def current(self) -> tuple[str, float]:
        """The current phase, and the seconds since it began."""
        phase, began = self._current
        return phase, time.monotonic() - began

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each phase so far, without the current one."""
        return dict(self._seconds)


def shares(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The share of each phase in the time between two readings of `Phases.seconds`, the largest first."""
    spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in now.items()}
    total = sum(spent.values())
    return {phase: spent[phase] / total for phase in sorted(spent, key=spent.__getitem__, reverse=True) if total > 0}


@contextlib.contextmanager
def compilation_phase(phases: Phases) -> Iterator[None]:
    """Count the time in which numba compiles (functions from its cache are not compiled) as a phase."""
    if "numba" not in sys.modules:  # this run compiles nothing, and the import takes a second
        yield
        return
    try:
        from numba.core import event  # not public: without it, compiling counts as part of another phase
    except ImportError:
        yield
        return

    class Compilation(event.Listener):  # type: ignore[misc]
        def __init__(self) -> None:
            self.interrupted: list[str] = []  # phases to return to; nested, as a function compiles those it calls

        def on_start(self, _: Any) -> None:
            self.interrupted.append(phases.enter("compiling"))

        def on_end(self, _: Any) -> None:
            phases.enter(self.interrupted.pop())

    with event.install_listener("numba:compile", Compilation()):
        yield
