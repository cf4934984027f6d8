"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal, a dropped connection) stop a run at a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

HANG_UP = getattr(signal, "SIGHUP", None)  # None: not a POSIX system


class Interrupts:
    """The first signal calls `stop`; a second one ends the process at once.

    A second SIGHUP is ignored: the shell and the system may each send one when a terminal closes.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self.stop = stop
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            numbers = [number for number in (signal.SIGINT, signal.SIGTERM, HANG_UP) if number is not None]
            # Ignored signals stay ignored: nohup ignores SIGHUP, and a shell SIGINT for its background jobs.
            handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
            self.previous = {number: signal.signal(number, self._handle) for number in handled}

    def remove(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == HANG_UP:
                return
            raise KeyboardInterrupt
        self.received = number
        self.stop(f"received {signal.Signals(number).name}")
