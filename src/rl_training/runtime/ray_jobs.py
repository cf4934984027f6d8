"""Training jobs on Ray: an actor on some machine of the cluster starts the job's process there."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import Any

import ray

from rl_training.errors import InputError
from rl_training.runtime.job_host import JobHost
from rl_training.runtime.ray_session import RaySession

READY_SECONDS = 600.0  # that Ray has to find a machine for a job, which may have to be started


class RemoteHost(JobHost):
    """A JobHost on another machine, which must see the folder of the jobs."""

    def __init__(self, order: dict[str, Any], *, environment: dict[str, str], directory: str) -> None:
        if not Path(directory, order["folder"]).is_dir():
            raise InputError(
                f"{platform.node()} does not see the folder {Path(directory, order['folder'])}: "
                "jobs on a cluster need an --out that all its machines share"
            )
        super().__init__(order, environment=environment, directory=directory)

    def ready(self) -> None:
        """Answers as soon as the actor exists."""


class RayHost:
    """The actor's methods. One that dies, or cannot be made, is a job that failed."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.ready = actor.ready.remote()
        self.limit = time.monotonic() + READY_SECONDS

    def poll(self) -> list[dict[str, Any]]:
        try:
            if self.ready is not None:
                if not ray.wait([self.ready], timeout=0)[0]:
                    if time.monotonic() > self.limit:
                        raise TimeoutError(f"Ray found no machine for it within {READY_SECONDS:.0f} seconds")
                    return []
                ray.get(self.ready)
                self.ready = None
            messages: list[dict[str, Any]] = ray.get(self.actor.poll.remote())
            return messages
        except ray.exceptions.RayActorError as error:
            cause = str(getattr(error, "cause", None) or error).strip().splitlines()
            return [{"kind": "end", "status": "failed", "error": f"on Ray: {cause[-1] if cause else 'its actor died'}"}]
        except (ray.exceptions.RayError, TimeoutError) as error:
            return [{"kind": "end", "status": "failed", "error": f"on Ray: {error}"}]

    def send(self, message: Any) -> None:
        self.actor.send.remote(message)

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # it has died
            ray.get(self.actor.wait.remote(seconds), timeout=seconds + 5)
        ray.kill(self.actor, no_restart=True)

    def kill(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # it has died, and its process with it
            ray.get(self.actor.kill.remote(), timeout=5)
        ray.kill(self.actor, no_restart=True)


class RayPlace:
    """The machines of a Ray cluster, or this one alone. A job takes a core, or its share of the GPUs as well."""

    def __init__(self, address: str | None, size: int | None) -> None:
        self.session = RaySession(address, cores=size or 1, key="--ray")
        try:
            cores = self.session.cores
            self.size = size or cores
            if self.size > cores:
                raise InputError(f"--jobs {self.size}: each job takes a core, and Ray has {cores}: lower it")
        except BaseException:
            self.session.close()
            raise
        self.threads = max(1, cores // self.size)
        self.gpus = min(1.0, self.session.gpus / self.size)

    def start(self, order: dict[str, Any], slot: int) -> RayHost:
        gpus = 0.0 if order["config"].get("device") == "cpu" else self.gpus
        options = {"num_cpus": self.threads, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        actor = ray.remote(RemoteHost).options(**options)
        return RayHost(actor.remote(order, environment=environment, directory=os.getcwd()))

    def close(self) -> None:
        self.session.close()
