"""Actors in processes of this machine: rollouts and weights lie in shared memory, messages go through sockets."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import subprocess
import sys
import time
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from rl_training.data.batch import tree_map
from rl_training.data.rollout_parts import RolloutPart, read_part
from rl_training.data.shared_memory import SharedMemory, arrays_in, shared_bytes
from rl_training.envs.workers import CLOSING
from rl_training.errors import InputError
from rl_training.runtime.fleet import ActorFault, Arrival, Event
from rl_training.runtime.processes import end, exit_text, import_path
from rl_training.runtime.rollout_worker import Order, WorkerPlan
from rl_training.types import Field, Fields, Weights


class ProcessFleet:
    """A process for each worker.

    Who may touch which memory is settled by messages. A rollout's place is given to a worker with an order and comes
    back with the answer. Weights are written to a place that no order under way names, so nobody reads them half.
    """

    def __init__(self, size: int) -> None:
        if os.name != "posix":
            raise InputError("execution.backend: process needs a POSIX system; use serial or ray")
        self.size = size
        self.processes: dict[int, subprocess.Popen] = {}
        self.connections: dict[int, Any] = {}
        self.rollout_memory, self.weights_memory = SharedMemory(), SharedMemory()
        self.free: list[int] = []  # places of rollouts
        self.places: dict[int, int] = {}  # by worker: where its rollout will lie
        self.reading: dict[int, int] = {}  # by worker: where the weights of its order lie
        self.newest, self.version = 0, -1  # the place of the newest weights, and their version

    def start(self, index: int, plan: WorkerPlan) -> None:
        ours, theirs = multiprocessing.connection.Pipe()
        descriptors = [theirs.fileno(), self.rollout_memory.descriptor, self.weights_memory.descriptor]
        self.processes[index] = subprocess.Popen(
            [sys.executable, "-m", "rl_training.runtime.actor_process", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the learner; and all that an actor starts can be killed with it
        )
        theirs.close()
        self.connections[index] = ours
        self._send(index, "open", CloudpickleWrapper(plan))  # type: ignore[arg-type]

    def _send(self, index: int, command: str, argument: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the next `events` tells
            self.connections[index].send((command, argument))

    def ask(self, index: int, command: str, argument: Any) -> None:
        self._send(index, command, argument)

    def allocate(self, fields: Fields, num_rollouts: int) -> None:
        size = shared_bytes(fields)
        self.rollout_memory.resize(size * num_rollouts)
        memory = self.rollout_memory.bytes
        self.rollouts = [arrays_in(memory, place * size, fields) for place in range(num_rollouts)]
        self.free = list(range(num_rollouts))

    def publish(self, weights: Weights) -> None:
        if self.version < 0:
            fields, places = weights_fields(weights), self.size + 2
            self.weights_memory.resize(shared_bytes(fields) * places)
            memory = self.weights_memory.bytes
            self.weights = [arrays_in(memory, place * shared_bytes(fields), fields) for place in range(places)]
        taken = {*self.reading.values(), self.newest}
        self.newest = next(place for place in range(self.size + 2) if place not in taken)
        target = self.weights[self.newest]
        target["vector"][:] = weights.vector
        for name, value in weights.buffers.items():
            target["buffers"][name][...] = value
        self.version = weights.version

    def order(self, index: int, order: Order) -> None:
        self.places[index], self.reading[index] = self.free.pop(), self.newest
        self._send(index, "play", (order, self.version, self.newest, self.places[index]))

    def events(self, seconds: float) -> list[Event]:
        numbers = {connection: index for index, connection in self.connections.items()}
        ready = multiprocessing.connection.wait(list(numbers), seconds)
        return [self._receive(numbers[connection]) for connection in ready]

    def _receive(self, index: int) -> Event:
        try:
            kind, content = self.connections[index].recv()
        except (EOFError, OSError):
            fault = ActorFault(f"its process ended with {self._exit_of(index)}")
            self.kill(index)
            return Event(index, fault=fault)
        if kind == "failed":
            fault = ActorFault(content[0])
            fault.trace = content[1]
            self.kill(index)
            return Event(index, fault=fault)
        if kind == "played":
            report, num_ends = content
            del self.reading[index]
            return Event(index, rollout=Arrival(report, (self.places.pop(index), num_ends)))
        return Event(index, answer=content)

    def _exit_of(self, index: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.processes[index].wait(CLOSING)
            return exit_text(code)
        return "its connection"

    def part(self, rollout: Arrival) -> RolloutPart:
        place, num_ends = rollout.place
        return read_part(self.rollouts[place], num_ends)

    def release(self, rollout: Arrival) -> None:
        self.free.append(rollout.place[0])

    def kill(self, index: int) -> None:
        end(self.processes.pop(index))
        self.connections.pop(index).close()
        self.reading.pop(index, None)
        if index in self.places:
            self.free.append(self.places.pop(index))

    def close(self) -> None:
        for index in self.connections:
            self._send(index, "close", None)
        limit = time.monotonic() + CLOSING
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
        for index in list(self.processes):
            self.kill(index)
        self.rollout_memory.close()
        self.weights_memory.close()


def weights_fields(weights: Weights) -> Fields:
    """The arrays of weights in shared memory."""
    arrays = {"vector": weights.vector, "buffers": weights.buffers}
    fields: Fields = tree_map(lambda array: Field(array.shape, array.dtype), arrays)
    return fields
