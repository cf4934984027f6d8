"""Ray, started on this machine or joined as a cluster, and stopped again by whoever started it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.processes import import_path

try:
    import ray
except ImportError as error:
    raise MissingPackage('Ray needs its package: pip install "rl-training[ray]"') from error


class RaySession:
    """A connection to Ray. One that exists already is used, and left open."""

    def __init__(self, address: str | None, *, cores: int, key: str) -> None:
        """Without an address Ray is started here, with `cores` at least. `key`: what errors name."""
        self.started = not ray.is_initialized()
        if self.started:
            start_ray(address, cores=cores, key=key)

    @property
    def cores(self) -> int:
        return self._number_of("CPU")

    @property
    def gpus(self) -> int:
        return self._number_of("GPU")

    def _number_of(self, resource: str) -> int:
        return int(ray.cluster_resources().get(resource, 0))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        if self.started:
            ray.shutdown()


def start_ray(address: str | None, *, cores: int, key: str) -> None:
    """Connect to a cluster, or start Ray here, with `cores` even if there are fewer."""
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        variables = {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        cores = max(cores, os.cpu_count() or 1)
        options |= {"address": "local", "num_cpus": cores, "include_dashboard": False}
        options |= {"runtime_env": {"env_vars": variables}}
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
