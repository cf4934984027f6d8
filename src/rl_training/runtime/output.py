"""Standard output and error of a command, whatever has become of them."""

from __future__ import annotations

import os
import sys


def prepare_output() -> None:
    """Output that is closed goes nowhere, and what its encoding lacks is replaced: neither ends a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def leave_lost_output() -> None:
    """What a terminal that is gone did not take is dropped, or Python would fail to write it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
