"""What an actor pool needs from the processes or machines that its workers run on."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from rl_training.data.rollout_parts import RolloutPart
from rl_training.envs.faults import EnvironmentFault
from rl_training.runtime.rollout_worker import Order, Report, WorkerPlan
from rl_training.types import Fields, Weights


class ActorFault(EnvironmentFault):
    """An actor ended, failed or did not answer. `trace` is its own traceback, if there is one."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace

    between_updates = True


class Event(NamedTuple):
    """What came from a worker: its answer, a rollout, or the news of its end."""

    worker: int
    answer: Any = None
    rollout: Arrival | None = None
    fault: ActorFault | None = None


class Arrival(NamedTuple):
    """A rollout that arrived, and the place where it lies."""

    report: Report
    place: Any


class Fleet(Protocol):
    """Workers by number. One request at a time may be under way to each; every request gives one event."""

    def start(self, index: int, plan: WorkerPlan) -> None:
        """Start a worker, in place of one that has died. Its first event answers with WorkerFacts."""

    def ask(self, index: int, command: str, argument: Any) -> None:
        """Have a worker carry out a command of RolloutWorker.do."""

    def allocate(self, fields: Fields, num_rollouts: int) -> None:
        """Make room for so many rollouts with these fields, see `part_fields`."""

    def publish(self, weights: Weights) -> None:
        """Rollouts that are ordered from now on are played with these weights."""

    def order(self, index: int, order: Order) -> None:
        """Have a worker play a rollout with the newest weights."""

    def wait(self, seconds: float) -> None:
        """Wait until something has come, or for so long. Other threads may use the fleet meanwhile."""

    def events(self) -> list[Event]:
        """What has come."""

    def part(self, rollout: Arrival) -> RolloutPart:
        """The steps of a rollout, valid until it is released."""

    def release(self, rollout: Arrival) -> None: ...

    def kill(self, index: int) -> str:
        """End a worker at once, with all that it started. Gives no event, but a traceback of where it was if it can."""

    def close(self) -> None:
        """End all workers."""
