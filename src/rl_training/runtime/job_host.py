"""A training job in a process of its own, as the process that started it sees it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rl_training.runtime.processes import exit_text, import_path

OUTPUT = "output.txt"  # in a job's folder: what its process prints
LAST_LINES = 3  # of the output, in the error of a process that ended without a message


class JobHost:
    """Starts a job's process, and passes on its messages: dicts of plain data. Also the class of a Ray actor."""

    def __init__(self, order: dict[str, Any], *, environment: dict[str, str], directory: str) -> None:
        """`order`: see job_process. The process runs in `directory`, where the job's paths are meant."""
        ours, theirs = multiprocessing.connection.Pipe()
        folder = Path(directory, order["folder"])
        self.output = folder / OUTPUT
        folder.mkdir(parents=True, exist_ok=True)
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rl_training.runtime.job_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, "PYTHONPATH": import_path(), **environment},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then asks the jobs to stop
            )
        theirs.close()
        self.connection = ours
        self.over = False
        self.send(order)

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the next `poll` tells
            self.connection.send_bytes(json.dumps(message).encode())

    def poll(self) -> list[dict[str, Any]]:
        """The messages since the last call. The last message of all has the kind `end`."""
        messages: list[dict[str, Any]] = []
        while not self.over and self.connection.poll():
            try:
                messages.append(json.loads(self.connection.recv_bytes()))
            except (EOFError, OSError):
                messages.append({"kind": "end", "status": "failed", "error": self._exit()})
            self.over = messages[-1]["kind"] == "end"
        return messages

    def _exit(self) -> str:
        """How the process ended that told nothing about it, and the last lines that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        code = self.process.poll()
        text = "its process " + (f"ended with {exit_text(code)}" if code is not None else "closed its connection")
        with contextlib.suppress(OSError):
            lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
            text = "\n".join([text, *lines[-LAST_LINES:]])
        return text

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, at most so long; then kill it."""
        limit = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, limit - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with all that it has started
        self.process.wait()
        self.connection.close()
        self.over = True
