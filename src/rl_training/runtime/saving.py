"""Saving while training continues: small parts are copied, large ones are held unchanged while a thread writes them."""

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
        # Not a daemon, even if a daemon starts it: the interpreter then ends after the job, not in the middle of it.
        thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=False)
        thread.start()
        self._thread = thread

    def wait(self) -> None:
        """Wait until nothing is being saved; raise the error of the last job."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait until nothing is being saved, and leave an error for `wait`."""
        if self._thread is not None:
            self._thread.join()  # a signal may raise out of this: the thread is then still ours
            self._thread = None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error

    def save(self, parts: Mapping[str, Any], write: Callable[[dict[str, State]], None], *, wait: bool) -> None:
        """Call `write` with the current state of each part.

        A part with `hold` is too large to copy: after `hold()`, its `state_dict` stays unchanged until the function
        that `hold` returned is called. With such a part and without `wait`, `write` runs in the background.
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
        except Exception:  # the system cannot start a thread
            holds.close()
            raise


def copied_state(value: Any) -> Any:
    """A copy of a nested state, on the CPU."""
    if isinstance(value, dict):
        return {key: copied_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied_state(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value
