"""Processes that are started beside this one: what they can import, and how they have ended."""

from __future__ import annotations

import os
import signal
import sys


def import_path() -> str:
    """PYTHONPATH for another process: all that can be imported here can be imported there."""
    return os.pathsep.join(os.path.abspath(folder) for folder in sys.path)


def exit_text(code: int) -> str:
    """`signal SIGKILL` or `exit code 1`."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
