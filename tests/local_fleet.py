"""Workers of an actor pool in this process, which play when a test lets them."""

from __future__ import annotations

import contextlib
import copy
import queue
from typing import Any

from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import RolloutPart, part_of
from rl_training.runtime.fleet import ActorFault, Arrival, Event
from rl_training.runtime.rollout_worker import Order, RolloutWorker, WorkerPlan
from rl_training.types import Fields, Weights


class LocalFleet:
    def __init__(self) -> None:
        self.workers: dict[int, RolloutWorker] = {}
        self.plans: list[WorkerPlan] = []
        self.weights: list[Weights] = []  # all that were published
        self.waiting: list[tuple[int, Order, Weights]] = []  # orders that are not played yet
        self.allowed = 0  # rollouts that are played as soon as they are ordered
        self.released = 0
        self.dead: set[int] = set()  # workers of whose end the pool does not know yet
        self._coming: queue.Queue[Event] = queue.Queue()
        self._come: list[Event] = []

    def start(self, index: int, plan: WorkerPlan) -> None:
        self.plans.append(plan)
        self.workers[index] = RolloutWorker(plan)
        self._coming.put(Event(index, answer=self.workers[index].facts()))

    def ask(self, index: int, command: str, argument: Any) -> None:
        self._coming.put(Event(index, answer=self.workers[index].do(command, argument)))

    def allocate(self, fields: Fields, num_rollouts: int) -> None:
        pass

    def publish(self, weights: Weights) -> None:
        self.weights.append(weights)

    def order(self, index: int, order: Order) -> None:
        if index in self.dead:
            return
        self.last = index, order, self.weights[-1]
        self.waiting.append(self.last)
        if self.allowed:
            self.allowed -= 1
            self.play(-1)

    def play(self, number: int = 0) -> None:
        """Play one of the rollouts that were ordered."""
        index, order, weights = self.waiting.pop(number)
        worker = self.workers[index]
        rollout = Rollout(order.hp.num_steps, worker.plan.num_envs, worker.fields)
        report = worker.play(order, weights, rollout)
        self._coming.put(Event(index, rollout=Arrival(report, copy.deepcopy(part_of(rollout)))))

    def die(self, index: int, trace: str = "") -> None:
        """The worker ends in the middle of what it does."""
        self.waiting = [order for order in self.waiting if order[0] != index]
        self.dead.add(index)
        self._coming.put(Event(index, fault=ActorFault("it was told to die", trace)))

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._come.append(self._coming.get(timeout=seconds))

    def events(self) -> list[Event]:
        come, self._come = self._come, []
        for event in come:
            if event.fault is not None:
                self.kill(event.worker)
        return come

    def part(self, rollout: Arrival) -> RolloutPart:
        part: RolloutPart = rollout.place
        return part

    def release(self, rollout: Arrival) -> None:
        self.released += 1

    def kill(self, index: int) -> str:
        self.workers.pop(index).close()
        self.dead.discard(index)
        return ""

    def close(self) -> None:
        for index in list(self.workers):
            self.kill(index)
