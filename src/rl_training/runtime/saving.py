"""Saving while training goes on: what is large is held still and written by a thread, what is small is copied first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rl_training.types import State


class Saver:
    """One job at a time, in a thread of its own; its error is raised once, by the next `start` or `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        self.wait()
        # Not a daemon, whoever starts it: the interpreter then ends after the job, not in the middle of it.
        thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=False)
        thread.start()
        self._thread = thread

    def wait(self) -> None:
        """Return once nothing is being saved; raise what went wrong."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """`wait` that leaves an error for later."""
        if self._thread is not None:
            self._thread.join()  # a signal may raise out of this: the thread is then still ours
            self._thread = None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error

    def save(self, parts: Mapping[str, Any], write: Callable[[dict[str, State]], None], *, wait: bool) -> None:
        """Call `write` with the state of each part, as it is now.

        A part with `hold` is too large to copy: between `hold()` and the call of what it returns, nothing changes what
        its `state_dict` gave. Only where there is one, and nobody waits, does `write` run in the background.
        """
        self.wait()
        held = {name for name, part in parts.items() if hasattr(part, "hold")}
        background = bool(held) and not wait
        with contextlib.ExitStack() as holds:
            for name in held:
                holds.callback(parts[name].hold())
            state = {
                name: copied_state(part.state_dict()) if background and name not in held else part.state_dict()
                for name, part in parts.items()
            }
            if background:
                self._start_holding(holds.pop_all(), lambda: write(state))
            else:
                write(state)

    def _start_holding(self, holds: contextlib.ExitStack, job: Callable[[], None]) -> None:
        def release_after() -> None:
            with holds:
                job()

        try:
            self.start(release_after)
        except Exception:  # the system has no thread to spare
            holds.close()
            raise


def copied_state(value: Any) -> Any:
    """The nested state in memory of its own, on the CPU, whatever happens to the original."""
    if isinstance(value, dict):
        return {key: copied_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied_state(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value
