"""One process for each environment: AsyncVectorEnv with time limits, and workers that end with their parent."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from rl_training.envs.faults import EnvironmentFault, raised
from rl_training.types import Array, State

IGNORED = ("SIGINT", "SIGTERM", "SIGHUP")  # sent to the whole process group; only the parent reacts to them
CLOSING = 5.0  # seconds that workers have to end by themselves


class RemoteError(Exception):
    """The cause of an error that another process raised. It shows the traceback, which cannot be sent itself."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Workers(AsyncVectorEnv):
    """An AsyncVectorEnv of `Episodes`. A step or a reset may take `timeout` seconds."""

    def __init__(self, make: Sequence[Callable[[], gym.Env]], *, env_id: str, timeout: float) -> None:
        self.env_id, self.timeout, self._owner = env_id, timeout, os.getpid()
        self._episode = np.full(len(make), -1)  # [N] number of the episode, counted here
        self._length = np.zeros(len(make), np.int64)  # [N] steps since the reset
        try:
            super().__init__(make, autoreset_mode=AutoresetMode.SAME_STEP, worker=functools.partial(run_worker, env_id))
        except BaseException:
            kill_all(getattr(self, "processes", ()))
            raise
        # At exit Python sends SIGTERM to processes that are left, which workers ignore. This runs before that.
        Finalize(self, kill_all, args=(self.processes,), exitpriority=10)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        rows = (options or {}).get("reset_mask", np.ones(self.num_envs, bool)).copy()
        self._episode[rows] += 1
        self._length[rows] = 0
        return self._answer("reset", self.timeout, seed=seed, options=options)  # type: ignore[no-any-return]

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        self._length += 1
        answer = self._answer("step", self.timeout, actions)
        over = answer[2] | answer[3]
        self._episode += over
        self._length[over] = 0
        return answer  # type: ignore[no-any-return]

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        answer: tuple[Any, ...] = self._answer("call", None, name, *args, **kwargs)  # a replay may take minutes
        return answer

    def count_from(self, states: Sequence[State]) -> None:
        """Set the counts to those of saved episodes."""
        self._episode = np.array([int(state["episode"]) for state in states])
        self._length = np.array([0 if state["actions"] is None else len(state["actions"]) for state in states])

    def _answer(self, what: str, timeout: float | None, *args: Any, **kwargs: Any) -> Any:
        """Send a command to all workers and return their answers."""
        try:
            getattr(self, f"{what}_async")(*args, **kwargs)
            return getattr(self, f"{what}_wait")(timeout=timeout)
        except multiprocessing.TimeoutError:
            self._hung(timeout)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._died(error)

    def _check_spaces(self) -> None:
        """Like the base class, but with a time limit: workers make their environments during this call."""
        spaces = (self.observation_mode, self.single_observation_space, self.single_action_space)
        try:
            for pipe in self.parent_pipes:
                pipe.send(("_check_spaces", spaces))
            end = time.monotonic() + self.timeout
            if not all(pipe.poll(max(0.0, end - time.monotonic())) for pipe in self.parent_pipes):
                self._hung(self.timeout)
            results, successes = zip(*(pipe.recv() for pipe in self.parent_pipes), strict=True)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._died(error)
        self._raise_if_errors(successes)
        for index, same in enumerate(results):
            if not all(same):
                raise EnvironmentFault(f"{self._where(index)}: it has other spaces than number 0")

    def _where(self, index: int) -> str:
        if self._episode[index] < 0:
            return f"environment {self.env_id!r}, number {index}, which is being made"
        when = f"step {self._length[index]}" if self._length[index] else "the beginning"
        return f"environment {self.env_id!r}, number {index}, at {when} of its episode {self._episode[index]}"

    def _hung(self, timeout: float | None) -> NoReturn:
        hung = [index for index, pipe in enumerate(self.parent_pipes) if pipe is not None and not pipe.poll(0)]
        for index in hung:
            self._drop(index)
        raise EnvironmentFault(
            f"{self._where(hung[0] if hung else 0)}: no answer within {timeout:g} s; if it may take that long, raise "
            "env_kwargs.env_timeout"
        ) from None

    def _died(self, error: Exception) -> NoReturn:
        time.sleep(0.1)  # a process that was killed is not gone at once
        dead = [index for index, process in enumerate(self.processes) if not process.is_alive()]
        self._state = AsyncState.DEFAULT
        if not dead:
            raise error
        code = self.processes[dead[0]].exitcode
        for index in dead:
            self._drop(index)
        raise EnvironmentFault(f"{self._where(dead[0])}: its process ended with exit code {code}") from None

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Raise the error of the first environment that failed. Unlike the base class, this gives no warnings."""
        failed = list(successes).count(False)
        if not failed:
            return
        self._state = AsyncState.DEFAULT
        errors = sorted((self.error_queue.get() for _ in range(failed)), key=lambda error: error[0])
        for index, *_ in errors:
            self._disconnect(index)  # the worker closes its environment now; `close_extras` waits for that
        _, _, error, trace = errors[0]
        raise error from RemoteError(getattr(error, "trace", "") or trace)

    def _drop(self, index: int) -> None:
        """Kill a worker that does not answer."""
        self.processes[index].kill()
        self._disconnect(index)

    def _disconnect(self, index: int) -> None:
        pipe = self.parent_pipes[index]
        if pipe is not None:
            pipe.close()
        self.parent_pipes[index] = None  # type: ignore[call-overload]

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask all workers to end. Kill those that do not."""
        if os.getpid() != self._owner:  # a copy of this object in a worker that was forked later
            return
        for pipe in self.parent_pipes:
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(OSError):  # the worker has ended
                    pipe.send(("close", None))
        end = time.monotonic() + (0.0 if terminate else CLOSING)
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        kill_all(self.processes)
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()


def kill_all(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def run_worker(env_id: str, index: int, make: Callable[[], gym.Env], pipe: Any, *others: Any) -> None:
    """The main function of a worker. It prints nothing: the parent reports errors."""
    ignore_signals()
    torch.set_num_threads(1)  # the parent's threads do not survive a fork: a worker would wait for them
    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            env = make()
        except Exception as error:
            fault = raised(f"environment {env_id!r}, number {index}", "its constructor", error)
            pipe.recv()  # the first command, answered below
            _, _, errors, *_ = others
            errors.put((index, EnvironmentFault, fault, fault.trace))
            pipe.send((None, False))
            return
        _async_worker(index, lambda: env, pipe, *others)


def ignore_signals() -> None:
    """Leave the signals of a process group to the parent."""
    for name in IGNORED:
        if hasattr(signal, name):
            # Not SIG_IGN: children of this process, such as simulators, would inherit that.
            signal.signal(getattr(signal, name), lambda *_: None)


def end_with_parent() -> None:
    """End this process when its parent ends, even in the middle of a long step."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
