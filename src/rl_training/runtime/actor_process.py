"""The main function of a process that hosts a rollout worker: see ProcessFleet."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing.connection
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import write_part
from rl_training.data.shared_memory import SharedMemory, arrays_in, shared_bytes
from rl_training.envs.workers import ignore_signals
from rl_training.runtime.process_fleet import weights_fields
from rl_training.runtime.rollout_worker import Order, Report, RolloutWorker, described
from rl_training.types import Fields, Weights


class HostedWorker:
    """A worker whose weights and rollouts lie in shared memory."""

    def __init__(self, worker: RolloutWorker, rollouts: SharedMemory, weights: SharedMemory) -> None:
        self.worker, self.rollout_memory, self.weights_memory = worker, rollouts, weights
        self.rollouts: dict[int, tuple[Rollout, Any]] = {}  # by place
        self.weights: dict[int, Any] = {}

    def do(self, command: str, argument: Any) -> tuple[str, Any]:
        """Carry out a command; (kind of the answer, the answer)."""
        if command == "play":
            return "played", self.play(*argument)
        answer = self.worker.do(command, argument)
        if command == "attach":
            self.fields: Fields = answer
        return "done", answer

    def play(self, order: Order, version: int, weights: int, place: int) -> tuple[Report, int]:
        """(the report, the number of the rollout's ends)"""
        rollout, target = self.rollout_at(place)
        report = self.worker.play(order, self.weights_at(weights, version), rollout)
        return report, write_part(rollout, target)

    def rollout_at(self, place: int) -> tuple[Rollout, Any]:
        if place not in self.rollouts:
            arrays = arrays_in(self.rollout_memory.bytes, place * shared_bytes(self.fields), self.fields)
            hp, num_envs = self.worker.actor.hp, self.worker.runner.num_envs
            rollout = Rollout(hp.num_steps, num_envs, self.worker.fields, arrays["arrays"])
            self.rollouts[place] = rollout, arrays
        return self.rollouts[place]

    def weights_at(self, place: int, version: int) -> Weights:
        if place not in self.weights:
            fields = weights_fields(self.worker.actor.weights())
            self.weights[place] = arrays_in(self.weights_memory.bytes, place * shared_bytes(fields), fields)
        return Weights(**self.weights[place], version=version)


def serve(connection: Any, rollouts: SharedMemory, weights: SharedMemory) -> None:
    """Carry out commands until one is `close` or fails."""
    _, plan = connection.recv()
    with contextlib.ExitStack() as closing:
        with reported(connection):
            worker = RolloutWorker(plan.fn)
            closing.callback(worker.close)
            connection.send(("done", worker.facts()))
        hosted = HostedWorker(worker, rollouts, weights)
        while True:
            command, argument = connection.recv()
            if command == "close":
                return
            with reported(connection):
                connection.send(hosted.do(command, argument))


@contextlib.contextmanager
def reported(connection: Any) -> Iterator[None]:
    """Send an error that is raised inside to the learner, and exit."""
    try:
        yield
    except BaseException as error:  # SystemExit as well: an environment may raise it
        connection.send(("failed", described(error)))
        raise SystemExit(1) from None


def end_with_learner(life: int) -> None:
    """Have the system end this process and those that it starts when the learner ends: see ActorProcess.

    The thread does so everywhere. The signal does so where a step never gives the interpreter back to the thread.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO ends whom it reaches

    def wait_for_the_end() -> None:
        hangs_up = select.poll()
        hangs_up.register(life, 0)
        hangs_up.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, daemon=True).start()


def main(descriptors: list[str]) -> None:
    number, life, trace, rollouts, weights = map(int, descriptors)
    for descriptor in (number, life, trace, rollouts, weights):
        os.set_inheritable(descriptor, False)
    ignore_signals()
    end_with_learner(life)
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=False)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(multiprocessing.connection.Connection(number), SharedMemory(rollouts), SharedMemory(weights))


if __name__ == "__main__":
    main(sys.argv[1:])
