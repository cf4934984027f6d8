"""Jobs without processes: a place whose hosts answer from a script, in which each step is one call of `poll`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Script = Iterator[dict[str, Any]]


def evaluation(step: int, total: int, score: float) -> dict[str, Any]:
    return {"kind": "evaluation", "step": step, "total": total, "metrics": {"eval_return_mean": score}}


def finished(score: float, reason: str | None = None) -> dict[str, Any]:
    return {"kind": "end", "status": "finished", "metrics": {"eval_return_mean": score}, "reason": reason}


def failed(error: str) -> dict[str, Any]:
    return {"kind": "end", "status": "failed", "error": error}


class FakeHost:
    """Plays a script: a function of the order and this host, which may look at `heard`."""

    def __init__(self, order: dict[str, Any], play: Callable[[dict[str, Any], FakeHost], Script]) -> None:
        self.order, self.heard, self.killed = order, [], False  # type: ignore[var-annotated]
        self.script = play(order, self)

    def poll(self) -> list[dict[str, Any]]:
        if "stop" in self.heard:
            return [{"kind": "end", "status": "interrupted"}]
        message = next(self.script, None)
        return [] if message is None or message == {} else [message]

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def wait(self, seconds: float) -> None: ...

    def kill(self) -> None:
        self.killed = True


class FakePlace:
    def __init__(self, size: int, play: Callable[[dict[str, Any], FakeHost], Script]) -> None:
        self.size, self.play = size, play
        self.hosts: list[FakeHost] = []
        self.closed = False

    def start(self, order: dict[str, Any], slot: int) -> FakeHost:
        self.hosts.append(FakeHost(order, self.play))
        return self.hosts[-1]

    def close(self) -> None:
        self.closed = True
