"""Hyperparameters over the course of training.

Any declared scalar may be fixed (`clip_coef: 0.2`), scheduled in place (`clip_coef: {kind: linear, ...}`), or given by
three keys (`clip_coef`, `clip_coef_schedule`, `clip_coef_warmup_steps`); `Controls.at(step)` resolves all of them. Only
this module and `schema` import `schedules`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from rl_training.algorithms.base import checked_scalar, scalar_names, without_effect
from rl_training.config import TrainConfig
from rl_training.errors import FIXED, ConfigError, InputError, Problem, problems_of, shown, unknown_key
from rl_training.runtime.hyperparameters import PARTS, Hyperparameter, adapter, hyperparameters_of, is_given, names_of
from rl_training.runtime.schedules import (
    ALL_FIELDS,
    KINDS,
    SYNONYMS,
    Constant,
    Schedule,
    Warmup,
    kind_of,
    parse_schedule,
)
from rl_training.types import State

VALUE_PARTS = ("", "_schedule")  # those of PARTS that give a value, not a warm-up
LARGEST_SETTING = 2**31 - 1  # no size or count is larger; `limits` checks what fits into memory


class Controls:
    """The hyperparameters of one run. Raises a ConfigError with everything that is wrong with `kwargs`."""

    def __init__(self, hyperparameters: type, kwargs: Mapping[str, Any], horizon: int, *, atari: bool = False) -> None:
        self.hyperparameters, self.kwargs, self.horizon = hyperparameters, kwargs, horizon
        self.declared = hyperparameters_of(hyperparameters, atari=atari)
        self.scalars = scalar_names(hyperparameters)
        values, self.schedules = read_hyperparameters(self.declared, kwargs, horizon)
        self.initial = hyperparameters(**values)
        self.varying = {name: schedule for name, schedule in self.schedules.items() if schedule.varies}
        self.overrides: dict[str, Any] = {}  # values written during the run, which replace their schedules

    @classmethod
    def of(cls, config: TrainConfig, hyperparameters: type, *, horizon: int | None = None) -> Controls:
        """`horizon` replaces that of the config."""
        return cls(hyperparameters, config.algo_kwargs, horizon or config.horizon, atari=config.uses_atari)

    def at(self, step: int) -> Any:
        """The hyperparameters in force at `step`, as an instance of the algorithm's own class."""
        if not self.varying and not self.overrides:
            return self.initial
        hp: Any = object.__new__(self.hyperparameters)
        # Without the frozen class's __init__: dataclasses.replace costs 20 times as much, at every step.
        hp.__dict__.update(self.initial.__dict__)
        for name, schedule in self.varying.items():
            hp.__dict__[name] = value_at(self.declared[name], schedule, step, self.horizon)
        hp.__dict__.update(self.overrides)
        return hp

    def scalars_of(self, hp: Any) -> dict[str, float]:
        """Every scalar in force, under its own name; one that is switched off is left out."""
        return {name: value for name in self.scalars if (value := getattr(hp, name)) is not None}

    def take_writes(self, learner: Any, in_force: Any) -> None:
        """Keep the values that a callback wrote to the learner, whose `hp` were `in_force`.

        `learner.clip_coef = 0.1` and `learner.hp = dataclasses.replace(...)` are the same; settings stay fixed.
        """
        hp = learner.hp
        written = vars(learner).pop("written", set())
        if hp is in_force:
            return
        if type(hp) is not self.hyperparameters:
            wanted = self.hyperparameters.__name__
            raise InputError(f"the learner's hp should be a {wanted}, got a {type(hp).__name__}")
        for name in self.declared:
            value, before = getattr(hp, name), getattr(in_force, name)
            if name in self.scalars and (name in written or value != before):
                self.overrides[name] = checked_scalar(hp, name, value)
            elif value != before:
                raise InputError(f"{name} is a setting, fixed for the whole run: it cannot become {value!r}")

    def state_dict(self) -> State:
        return {"overrides": dict(self.overrides)}

    def state_pattern(self) -> State:
        return {"overrides": {str: float | None}}

    def load_state_dict(self, state: State) -> None:
        for name, value in state["overrides"].items():
            if name not in self.scalars:
                raise InputError(f"overrides: {self.hyperparameters.__name__} has no scalar {name!r}")
            self.overrides[name] = checked_scalar(self.at(0), name, value)


def value_at(declared: Hyperparameter, schedule: Schedule, step: int, horizon: int) -> float:
    value = schedule.at(step, horizon)
    if declared.is_int:
        return to_int(value, declared.low, declared.high)
    return min(max(value, declared.low), declared.high)


def to_int(value: float, low: float, high: float) -> int:
    return int(min(max(round(value), low), high))


def read_hyperparameters(
    declared: Mapping[str, Hyperparameter], kwargs: Mapping[str, Any], horizon: int
) -> tuple[dict[str, Any], dict[str, Schedule]]:
    """The value of each hyperparameter at step 0, and the schedule of each scalar that is not switched off."""
    values: dict[str, Any] = {}
    schedules: dict[str, Schedule] = {}
    problems = unknown_keys(declared, kwargs) + unused_sources(declared, kwargs)
    needed_first = sorted(declared.items(), key=lambda item: item[1].needs is not None)
    for name, hyperparameter in needed_first:
        try:
            if not hyperparameter.has_effect(values):
                values[name] = read_without_effect(hyperparameter, kwargs)
            elif not hyperparameter.is_scalar:
                values[name] = read_setting(hyperparameter, kwargs)
            elif (schedule := read_scalar(hyperparameter, kwargs, values, horizon)) is None:
                values[name] = None
            else:
                values[name] = value_at(hyperparameter, schedule, 0, horizon)
                schedules[name] = schedule
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(Problem(("algo_kwargs", *p.path), p.message) for p in problems)
    return values, {name: schedules[name] for name in declared if name in schedules}


def unknown_keys(declared: Mapping[str, Hyperparameter], kwargs: Mapping[str, Any]) -> list[Problem]:
    """A misspelt hyperparameter is an error, never a silently used default."""
    scalars = [name for each in declared.values() if each.is_scalar for name in names_of(each.name)]
    known = [*declared, *(name + part for name in scalars for part in PARTS)]
    return [Problem((key,), unknown_key(str(key), known, "hyperparameter")) for key in kwargs if key not in known]


def unused_sources(declared: Mapping[str, Hyperparameter], kwargs: Mapping[str, Any]) -> list[Problem]:
    """Settings for a default schedule that is not used."""
    return [
        Problem((source,), f"has no effect, because {name} is given: drop one of them")
        for name, hyperparameter in declared.items()
        for source in hyperparameter.sources
        if source in kwargs and is_given(name, kwargs, VALUE_PARTS)
    ]


def read_without_effect(hyperparameter: Hyperparameter, kwargs: Mapping[str, Any]) -> Any:
    """The value of a hyperparameter that has no effect; to give one in the config is an error."""
    assert hyperparameter.needs is not None
    for key in (hyperparameter.name + part for part in PARTS):
        if kwargs.get(key) not in (None, "auto"):
            raise ConfigError.of(without_effect(hyperparameter.needs), key)
    return None if hyperparameter.is_scalar else hyperparameter.default


def read_setting(setting: Hyperparameter, kwargs: Mapping[str, Any]) -> Any:
    """A value that is fixed for the run, checked against its type and bounds."""
    name = setting.name
    if name not in kwargs:
        return setting.default
    value = kwargs[name]
    try:
        value = adapter(setting.hint).validate_python(value)
    except ValidationError as error:
        if is_schedule(value):
            raise ConfigError.of(f"is a setting, so it {FIXED}", name) from error
        keys = value if isinstance(value, Mapping) else ()
        raise ConfigError(problems_of(error, (name,), {}, keys)) from error
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float) and not setting.low <= number <= setting.high:
            raise ConfigError.of(f"should be {setting.bounds.replace('[', 'in [')}, got {shown(number)}", name)
        if isinstance(number, int) and number > LARGEST_SETTING:
            raise ConfigError.of(f"should be at most {LARGEST_SETTING:,}, got {shown(number)}", name)
    return value


def is_schedule(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not {"kind", *SYNONYMS}.isdisjoint(value)
    return isinstance(value, str) and value in KINDS


def schedule_keys(kind: Any) -> set[str]:
    """The keys of a kind of schedule; a ValueError for an unknown kind."""
    return {field.alias or name for name, field in kind_of(kind).model_fields.items()}


class ScalarConfig(NamedTuple):
    """The entries of the config for one scalar, under the name that the config uses."""

    name: str
    fixed: Any
    schedule: Any
    warmup_steps: Any


def find(kwargs: Mapping[str, Any], name: str) -> ScalarConfig | None:
    """The entries for the scalar `name` under any of its names; a ValueError if two names are used."""
    used = [n for n in names_of(name) if any(n + part in kwargs for part in PARTS)]
    if not used:
        return None
    if len(used) > 1:
        raise ValueError(f"{used[0]!r} and {used[1]!r} are two names of one number: use one of them")
    return ScalarConfig(used[0], *(kwargs.get(used[0] + part) for part in PARTS))


def read_scalar(
    scalar: Hyperparameter, kwargs: Mapping[str, Any], values: Mapping[str, Any], horizon: int
) -> Schedule | None:
    """The schedule of a scalar, checked against its bounds over the whole run; None: it is switched off.

    `values`: those of the hyperparameters declared before, from which a default schedule may be made.
    """
    if scalar.schedule is not None and not is_given(scalar.name, kwargs, VALUE_PARTS):
        if not values.keys() >= set(scalar.sources):
            raise ConfigError([])  # a source is wrong, which is reported already
        default = scalar.schedule(**{source: values[source] for source in scalar.sources})
        kwargs = {**kwargs, scalar.name: default}  # a warm-up may be given
    key = scalar.name
    try:
        given = find(kwargs, scalar.name)
        if given is not None:
            key = given.name + next(part for part in ("_schedule", "", "_warmup_steps") if given.name + part in kwargs)
            if kwargs[key] is None and not scalar.optional:
                raise ValueError("should be a number or a schedule, got nothing")
            if scalar.auto and given.fixed == "auto":
                if given.schedule is not None:
                    raise ValueError(f"is auto, so {given.name + '_schedule'!r} has no effect: drop one of them")
                given = given._replace(fixed=None)
        off = given is not None and scalar.optional and given.fixed is None and given.name in kwargs
        schedule = read_schedule(given, None if off else scalar.default)
        if schedule is not None:
            schedule.check_order(schedule.length_in(horizon))
            check_bounds(scalar, schedule, horizon)
    except ValidationError as error:
        raise ConfigError(problems_of(error, (key,), ALL_FIELDS)) from error
    except ValueError as error:
        raise ConfigError.of(str(error), key) from error
    return schedule


def read_schedule(given: ScalarConfig | None, default: float | None) -> Schedule | None:
    """The schedule of one scalar; a fixed value is a constant one. None: the scalar is switched off."""
    if given is None:
        return None if default is None else Constant(start=default)
    fixed, spec, warmup = default if given.fixed is None else given.fixed, given.schedule, given.warmup_steps
    schedule_key, warmup_key = given.name + "_schedule", given.name + "_warmup_steps"
    if isinstance(fixed, str):
        remedy = f"; write {schedule_key}: {fixed}" if fixed in KINDS else ""
        raise ValueError(f"should be a number or a schedule, got {shown(fixed)}{remedy}")
    if isinstance(fixed, Mapping | list):
        if spec is not None:
            raise ValueError(f"has a schedule already; drop {schedule_key!r}")
        spec, fixed = fixed, default
    if spec is None and fixed is None:
        if warmup is not None:
            raise ValueError(f"is switched off, so {warmup_key!r} has nothing to warm up")
        return None
    schedule = parse_schedule(fixed if spec is None else spec, fixed=fixed)
    if warmup is None:
        return schedule
    if schedule.warmup is not None:
        raise ValueError(f"has a warm-up in its schedule already; drop {warmup_key!r}")
    if warmup in (0, "0%") and warmup is not False:
        return schedule
    try:
        return schedule.model_copy(update={"warmup": Warmup.model_validate({"steps": warmup})})
    except ValidationError:
        wanted = "env steps, or per cent of the horizon such as 5%"
        raise ValueError(f"{warmup_key!r} should be {wanted}, got {shown(warmup)}") from None


def check_bounds(scalar: Hyperparameter, schedule: Schedule, horizon: int) -> None:
    """A scheduled integer is clipped to its bounds, so only a negative value or one above them is an error."""
    low = min(scalar.low, 0.0) if scalar.is_int and schedule.varies else scalar.low
    violation = schedule.first_violation(horizon, low=low, high=scalar.high)
    if violation is None:
        if scalar.is_int and not schedule.varies and schedule.at(0, horizon) % 1:
            raise ValueError(f"should be a whole number, got {schedule.at(0, horizon):g}")
        return
    step, value = violation
    when = f" at step {step:,} of {horizon:,}" if schedule.varies else ""
    warms_up = schedule.warmup and step == 0
    remedy = "; start the warm-up elsewhere with warmup: {steps: ..., from: ...}" if warms_up else ""
    raise ValueError(f"should be {scalar.bounds.replace('[', 'in [')}, got {value:.10g}{when}{remedy}")


def resolve(config: TrainConfig, name: str, *, step: int, default: float) -> float:
    """The value of the scalar `name` at `step`; a ValueError if it is negative."""
    schedule = read_schedule(find(config.algo_kwargs, name), default)
    value = default if schedule is None else schedule.at(step, config.horizon)
    if not value >= 0:
        raise ValueError(f"{name} should be >= 0, got {value:g} at step {step:,}")
    return value


def resolve_entropy_coefficient(
    config: TrainConfig, *, step: int, coefficient_key: str = "ent_coef", default: float
) -> float:
    return resolve(config, coefficient_key, step=step, default=default)


def resolve_clip_coefficient(config: TrainConfig, *, step: int, default: float) -> float:
    return resolve(config, "clip_coef", step=step, default=default)


def resolve_temperature(config: TrainConfig, *, step: int, default: float) -> float:
    return resolve(config, "temperature", step=step, default=default)


def resolve_num_simulations(config: TrainConfig, *, step: int, default: int) -> int:
    return to_int(resolve(config, "num_simulations", step=step, default=default), 1, math.inf)
