"""Ctrl-C and SIGTERM, turned into an orderly end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """The first Ctrl-C or SIGTERM calls `stop`; a second one ends the process at once."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self.stop = stop
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}

    def remove(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        self.stop(f"received {signal.Signals(number).name}")
