"""Actors on Ray, on this machine or a cluster: rollouts and weights go through Ray's object store."""

from __future__ import annotations

import contextlib
import math
import queue
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from rl_training.config import Execution
from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import RolloutPart, part_of
from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.fleet import ActorFault, Arrival, Event
from rl_training.runtime.ray_session import RaySession
from rl_training.runtime.rollout_worker import Order, RolloutWorker, WorkerPlan, described
from rl_training.types import Fields, Weights

try:
    import ray
except ImportError as error:
    raise MissingPackage('execution.backend: ray needs its package: pip install "rl-training[ray]"') from error


class RayWorker:
    """A rollout worker in a process of Ray."""

    def open(self, plan: CloudpickleWrapper) -> Any:
        return self._answer(self._open, plan)

    def _open(self, plan: Any) -> Any:
        self.worker = RolloutWorker(plan.fn)
        self.rollout: Rollout | None = None
        return self.worker.facts()

    def do(self, command: str, argument: Any) -> Any:
        return self._answer(self.worker.do, command, argument)

    def play(self, order: Order, weights: Weights) -> Any:
        return self._answer(self._play, order, weights)

    def _play(self, order: Order, weights: Weights) -> Any:
        if self.rollout is None:
            plan = self.worker.plan
            self.rollout = Rollout(order.hp.num_steps, plan.num_envs, self.worker.fields)
        return self.worker.play(order, weights, self.rollout), part_of(self.rollout)

    def _answer(self, function: Any, *arguments: Any) -> tuple[str, Any]:
        try:
            return "done", function(*arguments)
        except BaseException as error:  # SystemExit as well: an environment may raise it
            return "failed", described(error)


class RayFleet:
    """A Ray actor for each worker. Ray finds a machine for it, also when it is started anew."""

    def __init__(self, execution: Execution) -> None:
        self.handles: dict[int, Any] = {}
        self.session = RaySession(execution.address, cores=execution.actors, key="execution.address")
        try:
            cores = self.session.cores
            if cores < execution.actors:
                raise InputError(
                    f"execution.actors: {execution.actors} actors take a core each, and Ray has {cores}: lower it, "
                    "or add machines with `ray start --address=...`"
                )
            gpus = self.session.gpus if execution.actor_device == "cuda" else None
            if gpus == 0:
                raise InputError("execution.actor_device: cuda, but Ray has no GPU: use cpu")
        except BaseException:
            self.close()
            raise
        self.gpus_each = min(1.0, math.floor(1e4 * gpus / execution.actors) / 1e4) if gpus else 0
        self.starts: dict[int, int] = {}  # by worker: how often it was started
        self.playing: set[int] = set()
        self.weights: Any = None  # the reference of the newest
        self.arrived: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self.waiting: list[tuple[int, int, Any]] = []  # what `wait` took from it

    def start(self, index: int, plan: WorkerPlan) -> None:
        options = {"num_cpus": 1, "num_gpus": self.gpus_each, "max_restarts": 0, "max_task_retries": 0}
        if self.gpus_each:
            plan = plan._replace(device="cuda")  # Ray shows it one GPU
        self.handles[index] = ray.remote(RayWorker).options(**options).remote()
        self.starts[index] = self.starts.get(index, 0) + 1
        self._expect(index, self.handles[index].open.remote(CloudpickleWrapper(plan)))  # type: ignore[arg-type]

    def _expect(self, index: int, reference: Any) -> None:
        start = self.starts[index]
        reference.future().add_done_callback(lambda future: self.arrived.put((index, start, future)))

    def ask(self, index: int, command: str, argument: Any) -> None:
        self._expect(index, self.handles[index].do.remote(command, argument))

    def allocate(self, fields: Fields, num_rollouts: int) -> None:
        """The object store makes room for each rollout as it comes."""

    def publish(self, weights: Weights) -> None:
        self.weights = ray.put(weights)

    def order(self, index: int, order: Order) -> None:
        self.playing.add(index)
        self._expect(index, self.handles[index].play.remote(order, self.weights))

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self.waiting.append(self.arrived.get(timeout=seconds))

    def events(self) -> list[Event]:
        while not self.arrived.empty():
            self.waiting.append(self.arrived.get())
        arrived, self.waiting = self.waiting, []
        # What is of a worker that was killed is left out.
        return [
            self._event(index, future)
            for index, start, future in arrived
            if start == self.starts[index] and index in self.handles
        ]

    def _event(self, index: int, future: Any) -> Event:
        playing = index in self.playing
        self.playing.discard(index)
        try:
            kind, content = future.result()
        except ray.exceptions.RayError as error:
            self.kill(index)
            return Event(index, fault=ActorFault(f"its process ended: {str(error).splitlines()[0]}"))
        if kind == "failed":
            self.kill(index)
            return Event(index, fault=ActorFault(*content))
        return Event(index, rollout=Arrival(*content)) if playing else Event(index, answer=content)

    def part(self, rollout: Arrival) -> RolloutPart:
        part: RolloutPart = rollout.place
        return part

    def release(self, rollout: Arrival) -> None:
        """Its memory is free when nobody refers to it."""

    def kill(self, index: int) -> str:
        self.playing.discard(index)
        ray.kill(self.handles.pop(index), no_restart=True)
        return ""

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # if a worker cannot be ended, the others are nevertheless
            closing.callback(self.session.close)
            for index in list(self.handles):
                closing.callback(self.kill, index)
