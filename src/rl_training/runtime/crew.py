"""The workers of an actor pool: a thread gives them orders, takes what they send, and starts those anew that died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_training.config import Execution
from rl_training.envs.workers import RemoteError
from rl_training.runtime.fleet import ActorFault, Arrival, Event, Fleet
from rl_training.runtime.rollout_worker import Order, WorkerFacts, WorkerPlan

TICK = 0.2  # seconds between two searches for workers that hang
START_TIMEOUT = 600.0  # seconds in which a worker makes its environments, or brings them back to a saved state
MOST_DEATHS, WITHIN = 3, 100  # a worker that dies so often within so many of its rollouts is not started again


class Member:
    """One worker, as the learner sees it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.doing: str | None = None  # opening, playing, or the command that it carries out; None: nothing
        self.since = 0.0
        self.started = self.rollouts = 0  # how often it was started; the rollouts that it has played
        self.deaths: list[int] = []  # the number of its rollouts at each
        self.question: tuple[str, Any] | None = None  # to be carried out next
        self.answer: Any = None

    def begin(self, doing: str | None) -> None:
        self.doing, self.since = doing, time.monotonic()


class Crew:
    """`changed` guards the crew, the fleet and what the functions use, which the thread calls.

    opened: called with the facts of each worker that was started. next_order: the order for an idle worker, by its
    number; None where it should wait. arrived: called with each rollout.
    """

    def __init__(
        self,
        fleet: Fleet,
        execution: Execution,
        make_plan: Callable[[int, int], WorkerPlan],
        opened: Callable[[WorkerFacts], None],
        next_order: Callable[[int], Order | None],
        arrived: Callable[[Arrival], None],
    ) -> None:
        self.fleet, self.execution, self.make_plan = fleet, execution, make_plan
        self.opened, self.next_order, self.arrived = opened, next_order, arrived
        self.members = [Member(index) for index in range(execution.actors)]
        self.attachment: Any = None  # the argument of `attach`, for workers that are started anew
        self.restarts = 0
        self.notes: list[str] = []
        self.failure: BaseException | None = None
        self.changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="actor pool", daemon=True)

    def open(self) -> None:
        """Start all workers, and wait until they have made their environments."""
        with self.changed:
            for member in self.members:
                self._start(member)
        self._thread.start()
        self.wait(lambda: all(member.doing is None for member in self.members))

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` is true; raise the error that ended the crew."""
        with self.changed:
            while True:
                if self.failure is not None:
                    trace = getattr(self.failure, "trace", "")
                    raise self.failure from (RemoteError(trace) if trace else None)
                if done():
                    return
                self.changed.wait(TICK)

    def ask(self, command: str, arguments: Sequence[Any]) -> list[Any]:
        """Have each worker carry out a command after what it is doing. The answers, in the order of the workers."""
        with self.changed:
            for member, argument in zip(self.members, arguments, strict=True):
                member.question = (command, argument)
            self.proceed()
            self.wait(lambda: all(member.question is None for member in self.members))
            return [member.answer for member in self.members]

    @property
    def num_playing(self) -> int:
        return sum(member.doing == "playing" for member in self.members)

    def proceed(self) -> None:
        """Give each idle worker what it should do."""
        for member in self.members:
            if member.doing is not None or self.failure is not None:
                continue
            if member.question is not None:
                member.begin(member.question[0])
                self.fleet.ask(member.index, *member.question)
            elif (order := self.next_order(member.index)) is not None:
                member.begin("playing")
                self.fleet.order(member.index, order)

    def close(self) -> None:
        with self.changed:
            self._closing = True
        if self._thread.ident is not None:
            self._thread.join()
        self.fleet.close()

    def _serve(self) -> None:
        try:
            while not self._closing and self.failure is None:
                self.fleet.wait(TICK)
                with self.changed:
                    for event in self.fleet.events():
                        self._handle(event)
                    self._find_hanging()
                    self.proceed()
                    self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                self.failure = self.failure or error
                self.changed.notify_all()

    def _handle(self, event: Event) -> None:
        member = self.members[event.worker]
        if event.fault is not None:
            self._died(member, event.fault)
            return
        finished = member.doing
        member.begin(None)
        if event.rollout is not None:
            member.rollouts += 1
            self.arrived(event.rollout)
        elif finished == "opening":
            self.opened(event.answer)
            if self.attachment is not None:
                member.begin("attach")
                self.fleet.ask(member.index, "attach", self.attachment)
        elif member.question is not None and finished == member.question[0]:
            member.question, member.answer = None, event.answer

    def _find_hanging(self) -> None:
        now = time.monotonic()
        for member in self.members:
            playing, limit = member.doing == "playing", self.execution.actor_timeout
            limit = limit if playing else max(limit, START_TIMEOUT)
            if member.doing is not None and now - member.since > limit:
                what = f"no answer within {limit:g} s ({member.doing})"
                remedy = "; if it may take that long, raise execution.actor_timeout" if playing else ""
                self._died(member, ActorFault(what + remedy, self.fleet.kill(member.index)))

    def _start(self, member: Member) -> None:
        member.begin("opening")
        self.fleet.start(member.index, self.make_plan(member.index, member.started))
        member.started += 1

    def _died(self, member: Member, fault: ActorFault) -> None:
        """Start a worker anew, or end the crew. One whose first environments cannot be made will not do better."""
        cannot_begin = member.started == 1 and member.doing != "playing" and bool(fault.trace)
        member.begin(None)
        member.deaths = [at for at in member.deaths if member.rollouts - at < WITHIN] + [member.rollouts]
        often = f"; it died {MOST_DEATHS} times within {WITHIN} rollouts" if len(member.deaths) >= MOST_DEATHS else ""
        fault.args = (f"actor {member.index}: {fault}{often}",)
        if often or cannot_begin or self.execution.on_actor_death == "fail":
            self.failure = self.failure or fault
            return
        self.restarts += 1
        self.notes.append(f"{fault}; it was started anew, in new episodes\n{fault.trace}".rstrip())
        self._start(member)
