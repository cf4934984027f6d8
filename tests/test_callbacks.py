"""Callbacks stop a run when they should, once per evaluation, and go on where they were after a resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from rl_training.runtime import callbacks
from rl_training.runtime.callbacks import CallbackOptions, EarlyStopping, TimeLimit, build_callbacks


class FakeRun:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.evaluations = 0
        self.reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = reason

    def evaluate(self, value: float, callback: Any) -> str | None:
        self.evaluations += 1
        self.metrics["eval_return_mean"] = value
        callback(self)
        return self.reason


def test_target() -> None:
    run, stopping = FakeRun(), EarlyStopping(target=100)
    assert run.evaluate(99.9, stopping) is None
    reason = run.evaluate(100.0, stopping)
    assert reason is not None
    assert "eval_return_mean 100 reached the target 100" in reason


def test_target_when_less_is_better() -> None:
    run, stopping = FakeRun(), EarlyStopping(target=1.0, mode="min")
    assert run.evaluate(2.0, stopping) is None
    assert run.evaluate(0.5, stopping) is not None


@pytest.mark.parametrize(
    ("values", "mode", "min_delta", "stops_at"),
    [
        ([1, 2, 2, 2], "max", 0.0, 4),
        ([1, 2, 1, 3, 2, 2], "max", 0.0, 6),
        ([3, 2, 2, 2.5], "min", 0.0, 4),
        ([1, 1.4, 1.5], "max", 0.5, 3),
        ([1, 1.4, 1.6, 1.7, 1.8], "max", 0.5, 5),
        ([math.nan, math.nan], "max", 0.0, 2),
        ([1, math.nan, 2, 0], "max", 0.0, None),
    ],
)
def test_patience_of_two(values: list[float], mode: Any, min_delta: float, stops_at: int | None) -> None:
    run, stopping = FakeRun(), EarlyStopping(patience=2, mode=mode, min_delta=min_delta)
    stopped = [i for i, value in enumerate(values, 1) if run.evaluate(value, stopping)]
    assert stopped[:1] == ([stops_at] if stops_at else [])


def test_records_between_evaluations_do_not_count() -> None:
    run, stopping = FakeRun(), EarlyStopping(patience=1)
    stopping(run)
    run.evaluate(1.0, stopping)
    for _ in range(5):
        stopping(run)
    assert run.reason is None
    assert stopping.num_bad == 0


def test_early_stopping_resumes() -> None:
    run, first = FakeRun(), EarlyStopping(patience=2)
    run.evaluate(5.0, first)
    run.evaluate(4.0, first)
    second = EarlyStopping(patience=2)
    second.load_state_dict(first.state_dict())
    second(run)
    assert run.reason is None
    assert run.evaluate(4.0, second) is not None


def test_a_metric_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="did you mean 'eval_return_mean'"):
        FakeRun().evaluate(1.0, EarlyStopping("eval_return_maen", target=1))


@pytest.mark.parametrize("arguments", [{}, {"patience": 0}, {"target": 1, "mode": "up"}])
def test_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"never stops|at least 1|mode"):
        EarlyStopping(**arguments)


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    run, limit = FakeRun(), TimeLimit(minutes=1.5)
    now[0] += 89.0
    limit(run)
    assert run.reason is None
    now[0] += 1.0
    limit(run)
    assert run.reason == "the time limit of 1.5 minutes is over"


def test_callbacks_from_a_config() -> None:
    assert build_callbacks({}) == build_callbacks(CallbackOptions()) == []
    stopping, limit = build_callbacks({"early_stopping": {"target": 475, "mode": "max"}, "time_limit": {"minutes": 2}})
    assert isinstance(stopping, EarlyStopping)
    assert stopping.target == 475
    assert stopping.patience is None
    assert isinstance(limit, TimeLimit)
    assert limit.minutes == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping": {}}, "needs target or patience"),
        ({"early_stopping": {"patience": 0}}, "greater than or equal to 1"),
        ({"early_stopping": {"target": "high"}}, "should be a number"),
        ({"time_limit": {"minutes": 0}}, "greater than 0"),
        ({"time_limit": {}}, "Field required"),
        ({"timelimit": {"minutes": 1}}, "Extra inputs"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_callbacks(options)
