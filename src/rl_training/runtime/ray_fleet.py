"""Actors on Ray, on this machine or a cluster: rollouts and weights go through Ray's object store."""

from __future__ import annotations

import contextlib
import queue
import traceback
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from rl_training.config import Execution
from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import RolloutPart, part_of
from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.fleet import ActorFault, Arrival, Event
from rl_training.runtime.ray_cluster import RayCluster
from rl_training.runtime.rollout_worker import Order, RolloutWorker, WorkerPlan
from rl_training.types import Fields, Weights

try:
    import ray
except ImportError as error:
    raise MissingPackage('execution.backend: ray needs its package: pip install "rl-training[ray]"') from error


class RayWorker:
    """A rollout worker in a process of Ray. Errors come back as text, because any class may be raised."""

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
        except Exception as error:
            trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
            known = isinstance(error, InputError)
            return "failed", (str(error) if known else f"{type(error).__name__}: {error}", trace)


class RayFleet:
    """A Ray actor for each worker. Ray finds a machine for it, also when it is started anew."""

    def __init__(self, execution: Execution) -> None:
        self.cluster = RayCluster(execution.address, cores=execution.actors, key="execution.address")
        try:
            cores = self.cluster.cores
            if cores < execution.actors:
                raise InputError(
                    f"execution.actors: {execution.actors} actors take a core each, and Ray has {cores}: lower it, "
                    "or add machines with `ray start --address=...`"
                )
        except BaseException:
            self.close()
            raise
        self.handles: dict[int, Any] = {}
        self.starts: dict[int, int] = {}  # by worker: how often it was started
        self.playing: set[int] = set()
        self.weights: Any = None  # the reference of the newest
        self.arrived: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()

    def start(self, index: int, plan: WorkerPlan) -> None:
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
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

    def events(self, seconds: float) -> list[Event]:
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while not found or not self.arrived.empty():
                index, start, future = self.arrived.get(timeout=0 if found else seconds)
                if start == self.starts[index] and index in self.handles:  # else it is of one that was killed
                    found.append(self._event(index, future))
        return found

    def _event(self, index: int, future: Any) -> Event:
        playing = index in self.playing
        self.playing.discard(index)
        try:
            kind, content = future.result()
        except ray.exceptions.RayError as error:
            self.kill(index)
            return Event(index, fault=ActorFault(f"its process ended: {str(error).splitlines()[0]}"))
        if kind == "failed":
            fault = ActorFault(content[0])
            fault.trace = content[1]
            self.kill(index)
            return Event(index, fault=fault)
        return Event(index, rollout=Arrival(*content)) if playing else Event(index, answer=content)

    def part(self, rollout: Arrival) -> RolloutPart:
        part: RolloutPart = rollout.place
        return part

    def release(self, rollout: Arrival) -> None:
        """Its memory is free when nobody refers to it."""

    def kill(self, index: int) -> None:
        self.playing.discard(index)
        ray.kill(self.handles.pop(index), no_restart=True)

    def close(self) -> None:
        for index in list(getattr(self, "handles", ())):
            self.kill(index)
        self.cluster.close()
