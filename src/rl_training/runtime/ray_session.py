"""Ray, started on this machine or joined as a cluster, and stopped again by whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.processes import import_path
from rl_training.runtime.ray_cluster import address_of, unreachable

try:
    import ray
except ImportError as error:
    raise MissingPackage('Ray needs its package: pip install "rl-training[ray]"') from error


GUARD = """
import os, signal, sys
processes = [os.pidfd_open(int(pid)) for pid in sys.argv[1:]]
sys.stdin.buffer.read()
for process in processes:
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class RaySession:
    """A connection to Ray. One that exists already is used, and left open."""

    def __init__(self, address: str | None, *, cores: int, key: str) -> None:
        """Without an address Ray is started here, with `cores` at least. `key`: what errors name."""
        self.started = not ray.is_initialized()
        self._guard: subprocess.Popen[bytes] | None = None
        if self.started:
            before = descendants(os.getpid())
            start_ray(address, cores=cores, key=key)
            self._guard = guarded(descendants(os.getpid()) - before) if address is None else None

    @property
    def cores(self) -> int:
        return self._number_of("CPU")

    @property
    def gpus(self) -> int:
        return self._number_of("GPU")

    def _number_of(self, resource: str) -> int:
        return int(ray.cluster_resources().get(resource, 0))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            if self._guard is not None:
                closing.callback(self._guard.communicate)  # closes its input, and waits for it
            if self.started:
                ray.shutdown()


def guarded(processes: set[int]) -> subprocess.Popen[bytes] | None:
    """A process that kills others when this one has ended, however that ends, and when its input is closed.

    Where a driver is killed, some processes of Ray would look for it for another minute.
    """
    if not hasattr(os, "pidfd_open") or not processes:
        return None
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", GUARD, *map(str, sorted(processes))],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals for this process's group are not for it
    )


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = set[int](), [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def no_cluster(address: str) -> str | None:
    """Why there is no cluster at an address; None if somebody answers there. Ray itself would try for minutes."""
    if "://" in address:
        return None
    found = address_of(address)
    return unreachable(found) if found else "none was started on this machine"


def start_ray(address: str | None, *, cores: int, key: str) -> None:
    """Connect to a cluster, or start Ray here, with `cores` even if there are fewer."""
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        variables = {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        cores = max(cores, os.cpu_count() or 1)
        options |= {"address": "local", "num_cpus": cores, "include_dashboard": False}
        options |= {"runtime_env": {"env_vars": variables}}
    elif problem := no_cluster(address):
        raise InputError(f"{key}: Ray: no cluster at {address!r}: {problem}")
    else:
        options |= {"address": address}
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
        if on_main_thread:
            signal.signal(signal.SIGTERM, handler)  # Ray sets one that exits, and leaves it
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"no cluster at {address!r}" if address else "it cannot be started here"
        raise InputError(f"{key}: Ray: {where}: {error}") from error
