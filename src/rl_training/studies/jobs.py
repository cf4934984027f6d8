"""Many training jobs at a time, each in a process of its own: on this machine, or on the machines of a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_training.envs.factory import usable_cores
from rl_training.errors import InputError
from rl_training.reports.runs import read_metadata
from rl_training.runtime.atomic_files import lock, write_text_atomic
from rl_training.runtime.interrupts import Interrupts
from rl_training.runtime.metadata import update_metadata
from rl_training.studies.job_host import JobHost
from rl_training.types import Metrics

POLL_SECONDS = 0.05
STOPPING_SECONDS = 10.0  # that a job's process has to end after its last message
JOB = "job.json"  # in a job's folder: its config, and how it ended


class JobsInterrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP: all jobs under way have saved a checkpoint and ended."""


@dataclass(frozen=True)
class Job:
    """A config to train, in a folder of its own that holds the run folders of all attempts."""

    name: str
    folder: Path
    config: dict[str, Any]  # plain data
    allow_import: bool = True
    asks: bool = False  # whether it waits for a decision after each evaluation


@dataclass(frozen=True)
class Outcome:
    status: str  # finished, failed or interrupted
    run_dir: Path | None = None  # that of the last attempt
    metrics: Metrics = field(default_factory=dict)  # the last of the run
    reason: str | None = None  # why it stopped before its last step
    error: str | None = None
    seconds: float = 0.0  # of the last attempt


class JobPlan(Protocol):
    """Which jobs there are, and what is done with their results."""

    def next(self) -> Job | None:
        """The next job to start; None: there is none, or none before another one ends."""

    def evaluated(self, job: Job, step: int, metrics: Metrics) -> bool:
        """Take note of an evaluation of a job that asks; whether the job shall go on."""

    def ended(self, job: Job, outcome: Outcome) -> None: ...


class View(Protocol):
    """What is shown of the jobs."""

    def started(self, job: Job) -> None: ...
    def progress(self, job: Job, step: int, total: int, metrics: Metrics) -> None: ...
    def ended(self, job: Job, outcome: Outcome) -> None: ...
    def message(self, text: str) -> None: ...
    def tick(self) -> None: ...


class Host(Protocol):
    """See JobHost."""

    def poll(self) -> list[dict[str, Any]]: ...
    def send(self, message: Any) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def kill(self) -> None: ...


class Place(Protocol):
    """Where jobs run."""

    size: int  # jobs at a time

    def start(self, order: dict[str, Any], slot: int) -> Host: ...
    def close(self) -> None: ...


class LocalPlace:
    """Processes of this machine, which share its cores."""

    def __init__(self, size: int) -> None:
        if os.name != "posix":
            raise InputError("several jobs at a time need a POSIX system; on Windows, use WSL")
        self.size = size
        self.threads = max(1, usable_cores() // size)
        self.gpus = visible_gpus()

    def start(self, order: dict[str, Any], slot: int) -> Host:
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        if len(self.gpus) > 1 and order["config"].get("device") in ("auto", "cuda"):
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        return JobHost(order, environment=environment, directory=os.getcwd())

    def close(self) -> None: ...


def visible_gpus() -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES, one for each GPU that torch sees."""
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(i) for i in range(count)]


def make_place(jobs: int | None, ray: str | None) -> Place:
    """`ray`: the address of a cluster, auto for the one of this machine, or "" to start Ray here; None: no Ray."""
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs should be at least 1, got {jobs}")
    if ray is None:
        return LocalPlace(jobs or 1)
    from rl_training.studies.ray_jobs import RayPlace

    return RayPlace(ray or None, jobs)


@dataclass
class _Running:
    job: Job
    host: Host
    started: float = field(default_factory=time.monotonic)
    asked_to_stop: bool = False


class Jobs:
    """Runs the jobs of a plan until there are none left, or a signal comes."""

    def __init__(self, plan: JobPlan, place: Place, view: View) -> None:
        self.plan, self.place, self.view = plan, place, view
        self.running: dict[int, _Running] = {}
        self.stopping: str | None = None  # the signal for which all jobs end

    def run(self) -> None:
        interrupts = Interrupts(self._stop)
        interrupts.install()
        try:
            while True:
                if not self.stopping:
                    self._start()
                if not self.running:
                    break
                if self.stopping:
                    self._ask_to_stop()
                for slot in list(self.running):
                    self._hear(slot)
                self.view.tick()
                time.sleep(POLL_SECONDS)
        finally:
            interrupts.remove()
            for running in self.running.values():
                with contextlib.suppress(Exception):  # of one that cannot be reached: the others are killed too
                    running.host.kill()
        if self.stopping:
            raise JobsInterrupted

    def _start(self) -> None:
        free = [slot for slot in range(self.place.size) if slot not in self.running]
        for slot in free:
            job = self.plan.next()
            if job is None:
                return
            write_job(job, Outcome("running"))
            order = {"config": job.config, "folder": str(job.folder), "asks": job.asks}
            host = self.place.start({**order, "allow_import": job.allow_import}, slot)
            self.running[slot] = _Running(job, host)
            self.view.started(job)

    def _stop(self, reason: str) -> None:
        """From a signal handler, which may interrupt anything: `run` does the rest."""
        self.stopping = reason

    def _ask_to_stop(self) -> None:
        asked = [running for running in self.running.values() if not running.asked_to_stop]
        for running in asked:
            running.asked_to_stop = True
            running.host.send("stop")
        if asked:
            words = f"{len(asked)} {'job' if len(asked) == 1 else 'jobs'} under way"
            self.view.message(f"{self.stopping}: stopping {words} at a checkpoint; press Ctrl-C again to kill them")

    def _hear(self, slot: int) -> None:
        running = self.running[slot]
        for message in running.host.poll():
            kind, job = message.pop("kind"), running.job
            if kind == "end":
                del self.running[slot]
                running.host.wait(STOPPING_SECONDS)
                self._end(running, message)
                return
            self.view.progress(job, **message)
            if kind == "evaluation":
                goes_on = self.plan.evaluated(job, message["step"], message["metrics"])
                running.host.send("continue" if goes_on else "prune")

    def _end(self, running: _Running, message: dict[str, Any]) -> None:
        if self.stopping and message["status"] == "failed" and "signal SIGTERM" in message["error"]:
            message = {"status": "interrupted"}  # before its run could react to signals
        found = message.pop("run_dir", None)
        run_dir = Path(found) if found else newest_run(running.job.folder)
        if message["status"] == "failed" and run_dir is not None:
            mark_failed(run_dir, message["error"])
        seconds = time.monotonic() - running.started
        outcome = Outcome(**message, run_dir=run_dir, seconds=seconds)
        write_job(running.job, outcome)
        self.plan.ended(running.job, outcome)
        self.view.ended(running.job, outcome)


def newest_run(folder: Path) -> Path | None:
    """The run folder of the last attempt."""
    found = [path.parent for path in folder.glob("*/config.yaml")]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def mark_failed(run_dir: Path, error: str) -> None:
    """Write the status that a run could not write itself, because its process was killed."""
    if read_metadata(run_dir).get("status") == "running":
        with contextlib.suppress(OSError):
            update_metadata(run_dir, status=f"failed: {error.splitlines()[0]}")


def write_job(job: Job, outcome: Outcome) -> None:
    run_dir = os.path.relpath(outcome.run_dir, job.folder) if outcome.run_dir else None  # the folder may be moved
    content = {"config": job.config, **asdict(outcome), "run_dir": run_dir}
    job.folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(job.folder / JOB, json.dumps(content, indent=2) + "\n")


def read_job(folder: Path) -> tuple[dict[str, Any], Outcome] | None:
    """The config of the job in a folder and its outcome; None if there was none."""
    path = folder / JOB
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = content.pop("config")
        run_dir = content.pop("run_dir")
        return config, Outcome(**content, run_dir=folder / run_dir if run_dir else None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be read ({type(error).__name__}: {error}): remove {folder}") from error


def finished_before(job: Job) -> Outcome | None:
    """The outcome of a job that has finished already; an InputError if its folder belongs to another config."""
    before = read_job(job.folder)
    if before is None:
        return None
    config, outcome = before
    if config != json.loads(json.dumps(job.config)):
        keys = sorted(key for key in {*config, *job.config} if config.get(key) != job.config.get(key))
        raise InputError(
            f"{job.folder} holds a run of another config (they differ in {', '.join(keys)}): "
            "choose another folder with --out, or remove this one"
        )
    return outcome if outcome.status == "finished" else None


def plain_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A config as JSON holds it, for another process; `output_dir` is the job's own."""
    plain = {key: value for key, value in config.items() if key != "output_dir"}
    try:
        copy: dict[str, Any] = json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: a config for another process is plain data: {error}") from error
    return copy


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, so that two commands do not write the same runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}; choose another folder with --out") from error
    descriptor = lock(folder)
    if descriptor is None and os.name == "posix":
        raise InputError(f"another {what} is running in {folder}: wait for it, or choose another folder with --out")
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
