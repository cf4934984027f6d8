"""A Ray cluster of several nodes on this machine, started as a user does, by `ray start`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

RAY = str(Path(sys.executable).parent / "ray")
STARTED = "--block"  # in the foreground, so that this process can end exactly what it has started


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


class Cluster:
    """Its folder is of its own, and so is the home in which Ray keeps its token: other clusters are not seen."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.nodes = folder, free_port(), list[subprocess.Popen[bytes]]()
        (folder / "home").mkdir()
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        own = {"RAY_TMPDIR": str(folder), "HOME": str(folder / "home"), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.environment: Mapping[str, str] = {**os.environ, **own, "RAY_AUTH_MODE": "disabled"}

    @property
    def address(self) -> str:
        return (self.folder / "ray" / "ray_current_cluster").read_text().strip()

    def start(self, *words: str) -> None:
        """`ray start` with these words, until it says that it runs."""
        log = self.folder / f"node{len(self.nodes)}.log"
        small = ["--object-store-memory=80000000", "--disable-usage-stats", "--include-dashboard=false"]
        command = [RAY, "start", *words, *(small if "--head" in words else small[:2]), STARTED]
        with open(log, "wb") as output:
            node = subprocess.Popen(command, stdout=output, stderr=output, env=self.environment, start_new_session=True)
        self.nodes.append(node)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def stop(self, node: int = -1) -> None:
        """Kill a node with all its processes, as a machine that loses power."""
        process = self.nodes.pop(node)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the path of a socket has at most 107 characters
    found = Cluster(folder)
    try:
        yield found
    finally:
        while found.nodes:
            found.stop()
        end_all_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


def end_all_of(folder: Path) -> None:
    """Kill what Ray has put into sessions of its own: every process whose arguments or environment name the folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = str(folder).encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if named and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
