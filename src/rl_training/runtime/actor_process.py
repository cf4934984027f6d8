"""The main function of a process that hosts a rollout worker: see ProcessFleet."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import select
import sys
import threading
import traceback
from typing import Any

from rl_training.data.rollout import Rollout
from rl_training.data.rollout_parts import write_part
from rl_training.data.shared_memory import SharedMemory, arrays_in, shared_bytes
from rl_training.envs.workers import ignore_signals
from rl_training.errors import InputError
from rl_training.runtime.process_fleet import weights_fields
from rl_training.runtime.rollout_worker import Order, Report, RolloutWorker
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
    """Carry out commands until one is `close`, the learner ends, or a command fails."""
    _, plan = connection.recv()
    with contextlib.ExitStack() as closing:
        worker = RolloutWorker(plan.fn)
        closing.callback(worker.close)
        connection.send(("done", worker.facts()))
        hosted = HostedWorker(worker, rollouts, weights)
        while True:
            command, argument = connection.recv()
            if command == "close":
                return
            connection.send(hosted.do(command, argument))


def end_with(connection: Any) -> None:
    """End this process when the learner's ends, even in the middle of a long step."""
    hangs_up = select.poll()
    hangs_up.register(connection.fileno(), 0)
    hangs_up.poll()
    os._exit(1)


def main(descriptors: list[str]) -> None:
    number, rollouts, weights = map(int, descriptors)
    ignore_signals()
    connection: Any = multiprocessing.connection.Connection(number)
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            serve(connection, SharedMemory(rollouts), SharedMemory(weights))
        except Exception as error:
            known = isinstance(error, InputError)
            trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
            connection.send(("failed", (str(error) if known else f"{type(error).__name__}: {error}", trace)))


if __name__ == "__main__":
    main(sys.argv[1:])
