"""Callbacks: called with the run after each record; `run.stop(reason)` ends training."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import Field, model_validator

from rl_training.config import Float, Int, Options
from rl_training.errors import InputError
from rl_training.runtime.checkpoints import PART_NAME
from rl_training.types import Metrics, State


class CallbackRun(Protocol):
    """The part of TrainingRun that the callbacks here use."""

    metrics: Metrics  # the last record

    @property
    def evaluations(self) -> int: ...  # the number of evaluations so far

    def stop(self, reason: str) -> None: ...


Callback: TypeAlias = Callable[[Any], None]  # one with state_dict and load_state_dict is saved with the run
CALLBACK = "callback_"  # prefix of the callbacks among the parts of a checkpoint


def name_callbacks(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """The callbacks that have a state, by the names of their parts in a checkpoint.

    A callback's name is its `name`, or else that of its class; equal names are numbered in order: A, A_2.
    """
    named: dict[str, Any] = {}
    for callback in callbacks:
        if not hasattr(callback, "state_dict"):
            continue
        name = getattr(callback, "name", None) or type(callback).__name__
        if not isinstance(name, str) or not PART_NAME.fullmatch(CALLBACK + name):
            raise InputError(f"a callback's name should be letters, digits, _ and -, got {name!r}")
        number, key = 1, CALLBACK + name
        while key in named:
            number += 1
            key = f"{CALLBACK}{name}_{number}"
        named[key] = callback
    return named


class EarlyStopping:
    """Stop when `metric` reaches `target`, or after `patience` evaluations without an improvement over `min_delta`."""

    def __init__(
        self,
        metric: str = "eval_return_mean",
        *,
        target: float | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if target is None and patience is None:
            raise ValueError("early stopping without target and patience never stops; give at least one of them")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 evaluation, got {patience}")
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}")
        self.metric, self.target, self.patience, self.min_delta, self.mode = metric, target, patience, min_delta, mode
        self._sign = 1.0 if mode == "max" else -1.0
        self.best: float | None = None
        self.num_bad = 0
        self._seen = 0

    def __call__(self, run: CallbackRun) -> None:
        if run.evaluations == self._seen:
            return
        self._seen = run.evaluations
        value = self._value(run.metrics)
        if self._improves(value):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1
        if self.target is not None and self._sign * value >= self._sign * self.target:
            run.stop(f"{self.metric} {value:g} reached the target {self.target:g}")
        elif self.patience is not None and self.num_bad >= self.patience:
            best = "never a number" if self.best is None else f"best {self.best:g}"
            run.stop(f"{self.metric} did not improve in {self.num_bad} evaluations ({best})")

    def _value(self, metrics: Metrics) -> float:
        if self.metric not in metrics:
            near = difflib.get_close_matches(self.metric, metrics, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "the run records " + ", ".join(sorted(metrics))
            raise InputError(f"early stopping watches {self.metric!r}, which the run does not record; {hint}")
        return float(metrics[self.metric])

    def _improves(self, value: float) -> bool:
        return not math.isnan(value) and (self.best is None or self._sign * (value - self.best) > self.min_delta)

    def state_dict(self) -> State:
        return {"best": self.best, "num_bad": self.num_bad, "seen": self._seen}

    def state_pattern(self) -> State:
        return {"best": float | None, "num_bad": int, "seen": int}

    def load_state_dict(self, state: State) -> None:
        self.best, self.num_bad, self._seen = state["best"], state["num_bad"], state["seen"]


class TimeLimit:
    """Stop after `minutes` in this process; a resumed run counts from 0 again."""

    def __init__(self, minutes: float) -> None:
        if not minutes > 0:
            raise ValueError(f"minutes must be positive, got {minutes}")
        self.minutes = minutes
        self._start = time.monotonic()

    def __call__(self, run: CallbackRun) -> None:
        if time.monotonic() - self._start >= 60 * self.minutes:
            run.stop(f"the time limit of {self.minutes:g} minutes is over")


class EarlyStoppingOptions(Options):
    """Stop when an evaluation is good enough, or evaluations no longer improve."""

    metric: str = Field("eval_return_mean", description="metric to watch; checked after each evaluation")
    target: Float | None = Field(None, description="stop when the metric reaches this value")
    patience: Int | None = Field(None, ge=1, description="stop after this many evaluations without improvement")
    min_delta: Float = Field(0.0, ge=0, description="smallest change that counts as an improvement")
    mode: Literal["max", "min"] = Field("max", description="max: higher is better; min: lower is better")

    @model_validator(mode="after")
    def _can_stop(self) -> EarlyStoppingOptions:
        if self.target is None and self.patience is None:
            raise ValueError("needs target or patience, or it never stops")
        return self


class TimeLimitOptions(Options):
    """Stop after a wall-clock time."""

    minutes: Float = Field(gt=0, description="wall-clock minutes of training; a resumed run counts from 0 again")


class CallbackOptions(Options):
    """The callbacks that a config can name."""

    early_stopping: EarlyStoppingOptions | None = Field(None, description="stop at a target or without improvement")
    time_limit: TimeLimitOptions | None = Field(None, description="stop after a wall-clock time")


def build_callbacks(options: CallbackOptions | dict[str, Any]) -> list[Callback]:
    options = CallbackOptions.model_validate(options)
    kinds = ((EarlyStopping, options.early_stopping), (TimeLimit, options.time_limit))
    return [kind(**given.model_dump()) for kind, given in kinds if given is not None]
