"""Actors in processes of this machine: rollouts and weights lie in shared memory, messages go through sockets."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from rl_training.data.batch import tree_map
from rl_training.data.rollout_parts import RolloutPart, read_part
from rl_training.data.shared_memory import SharedMemory, arrays_in, new_file, shared_bytes
from rl_training.envs.workers import CLOSING
from rl_training.errors import InputError
from rl_training.runtime.fleet import ActorFault, Arrival, Event
from rl_training.runtime.processes import exit_text, import_path
from rl_training.runtime.rollout_worker import Order, WorkerPlan
from rl_training.types import Field, Fields, Weights

DUMPING = 1.0  # seconds in which a process that hangs writes where it is


class ProcessFleet:
    """A process for each worker.

    Who may touch which memory is settled by messages. A rollout's place is given to a worker with an order and comes
    back with the answer. Weights are written to a place that no order under way names, so nobody reads them half.
    """

    def __init__(self, size: int) -> None:
        if os.name != "posix":
            raise InputError("execution.backend: process needs a POSIX system; use serial or ray")
        self.size = size
        self.processes: dict[int, ActorProcess] = {}
        self.rollout_memory, self.weights_memory = SharedMemory(), SharedMemory()
        self.free: list[int] = []  # places of rollouts
        self.places: dict[int, int] = {}  # by worker: where its rollout will lie
        self.reading: dict[int, int] = {}  # by worker: where the weights of its order lie
        self.newest, self.version = 0, -1  # the place of the newest weights, and their version

    def start(self, index: int, plan: WorkerPlan) -> None:
        memory = self.rollout_memory.descriptor, self.weights_memory.descriptor
        self.processes[index] = ActorProcess(*memory)
        self.processes[index].send("open", CloudpickleWrapper(plan))  # type: ignore[arg-type]

    def ask(self, index: int, command: str, argument: Any) -> None:
        self.processes[index].send(command, argument)

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
        self.processes[index].send("play", (order, self.version, self.newest, self.places[index]))

    def wait(self, seconds: float) -> None:
        multiprocessing.connection.wait([process.connection for process in self.processes.values()], seconds)

    def events(self) -> list[Event]:
        found = []
        for index, process in list(self.processes.items()):
            ended = process.ended()  # before looking for messages: what it sent has come by then
            if process.connection.poll():
                found.append(self._receive(index))
            elif ended:
                found.append(self._end_of(index))
        return found

    def _receive(self, index: int) -> Event:
        try:
            kind, content = self.processes[index].connection.recv()
        except (EOFError, OSError):
            return self._end_of(index)
        if kind == "failed":
            self._remove(index)
            return Event(index, fault=ActorFault(*content))
        if kind == "played":
            report, num_ends = content
            del self.reading[index]
            return Event(index, rollout=Arrival(report, (self.places.pop(index), num_ends)))
        return Event(index, answer=content)

    def _end_of(self, index: int) -> Event:
        process = self.processes[index]
        process.wait(CLOSING)
        trace, code = process.trace(), self._remove(index)
        return Event(index, fault=ActorFault(f"its process ended with {exit_text(code)}", trace))

    def part(self, rollout: Arrival) -> RolloutPart:
        place, num_ends = rollout.place
        return read_part(self.rollouts[place], num_ends)

    def release(self, rollout: Arrival) -> None:
        self.free.append(rollout.place[0])

    def kill(self, index: int) -> str:
        where = self.processes[index].whereabouts()
        self._remove(index)
        return where

    def _remove(self, index: int) -> int:
        """End a process, free what it had, and return its exit code."""
        self.reading.pop(index, None)
        if index in self.places:
            self.free.append(self.places.pop(index))
        return self.processes.pop(index).end()

    def close(self) -> None:
        for process in self.processes.values():
            process.send("close", None)
        limit = time.monotonic() + CLOSING
        for process in self.processes.values():
            process.wait(limit - time.monotonic())
        for index in list(self.processes):
            self._remove(index)
        self.rollout_memory.close()
        self.weights_memory.close()


class ActorProcess:
    """The process of a worker: its messages, and its end. See actor_process.

    It holds one end of a pipe, whose other end is here alone: when that is closed, as it is with any end of this
    process, the system ends the actor. It writes a traceback into a file where it crashes, or where it is told to.
    """

    def __init__(self, *memory: int) -> None:
        """memory: the descriptors of what is shared with it."""
        self.connection, theirs = multiprocessing.connection.Pipe()
        life, self._life = os.pipe()
        self._trace = new_file()
        descriptors = [theirs.fileno(), life, self._trace, *memory]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl_training.runtime.actor_process", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the learner; and all that an actor starts can be killed with it
            )
        finally:
            theirs.close()
            os.close(life)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: str, argument: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the next `events` tells
            self.connection.send((command, argument))

    def ended(self) -> bool:
        """Whether it has ended. Until `end` it is not reaped, so that its number belongs to nobody else."""
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or for so long."""
        limit = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < limit:
            time.sleep(0.005)

    def trace(self) -> str:
        """What it has written about where it was."""
        return os.pread(self._trace, 1 << 16, 0).decode(errors="replace")

    def whereabouts(self) -> str:
        """Have it write where it is, without its cooperation. Gives "" if it cannot, because it is stopped."""
        os.kill(self.pid, signal.SIGUSR1)
        limit, before = time.monotonic() + DUMPING, ""
        while (now := self.trace()) != before or (not now and time.monotonic() < limit):  # it comes in pieces
            before = now
            time.sleep(0.02)
        return now

    def end(self) -> int:
        """Kill it and the others of its session, and return its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system may be writing to a disk for it
            self._process.wait(CLOSING)
        self.connection.close()
        os.close(self._life)
        os.close(self._trace)
        code = self._process.returncode
        return -signal.SIGKILL if code is None else code


def weights_fields(weights: Weights) -> Fields:
    """The arrays of weights in shared memory."""
    arrays = {"vector": weights.vector, "buffers": weights.buffers}
    fields: Fields = tree_map(lambda array: Field(array.shape, array.dtype), arrays)
    return fields
