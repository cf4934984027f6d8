"""Hyperparameters as the training step sees them.

Any declared scalar may be fixed (`clip_coef: 0.2`), scheduled in place (`clip_coef: {kind: linear, ...}`), or given as
a triple (`clip_coef`, `clip_coef_schedule`, `clip_coef_warmup_steps`); `Controls.at(step)` resolves all of them. This
and `schedules` are the only modules that know schedules exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, cast, get_args, get_type_hints

from pydantic import ValidationError

from rl_training.algorithms.base import checked_scalar, scalar_names
from rl_training.config import (
    FIXED,
    SCHEDULE_PARTS,
    ConfigError,
    InputError,
    Problem,
    TrainConfig,
    problems_of,
    shown,
    unknown_key,
)
from rl_training.runtime.schedules import (
    ALL_FIELDS,
    KINDS,
    SYNONYMS,
    Constant,
    Schedule,
    Warmup,
    check_order,
    cut_short,
    dump_schedule,
    first_violation,
    is_zero_from,
    parse_schedule,
    telling_steps,
)
from rl_training.runtime.strict_types import accepts, adapter
from rl_training.types import State

ALIASES = (("clip_coef", "clip_range"), ("ent_coef", "entropy_coef"))  # each group: names of one number
PARTS = ("", *SCHEDULE_PARTS)
LARGEST_SETTING = 2**31 - 1  # beyond which no size or count is meant; what fits into memory is for `limits` to say


def names_of(name: str) -> tuple[str, ...]:
    """All names of the number `name`, itself first."""
    group = next((group for group in ALIASES if name in group), ())
    return (name, *(other for other in group if other != name))


class Given(NamedTuple):
    """What the config says of one number, and under which key."""

    key: str
    fixed: Any
    schedule: Any
    warmup_steps: Any


def find(kwargs: Mapping[str, Any], name: str) -> Given | None:
    """What `kwargs` says of `name` under any of its names; None if nothing, an error if it says it twice."""
    used = [n for n in names_of(name) if any(n + part in kwargs for part in PARTS)]
    if not used:
        return None
    if len(used) > 1:
        raise ValueError(f"{used[0]!r} and {used[1]!r} are two names of one number: use one of them")
    return Given(used[0], *(kwargs.get(used[0] + part) for part in PARTS))


def is_given(name: str, kwargs: Mapping[str, Any], parts: tuple[str, ...] = PARTS) -> bool:
    return any(n + part in kwargs for n in names_of(name) for part in parts)


def has_value(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether more is said of the number than how to warm it up."""
    return is_given(name, kwargs, ("", "_schedule"))


def read_schedule(given: Given | None, default: float | None) -> Schedule | None:
    """The schedule of one number; a fixed value is a constant one. None: the number is switched off."""
    if given is None:
        return None if default is None else Constant(start=default)
    fixed, spec, warmup = default if given.fixed is None else given.fixed, given.schedule, given.warmup_steps
    if isinstance(fixed, str):
        remedy = f"; write {given.key}_schedule: {fixed}" if fixed in KINDS else ""
        raise ValueError(f"should be a number or a schedule, got {shown(fixed)}{remedy}")
    if isinstance(fixed, Mapping | list):
        if spec is not None:
            raise ValueError(f"has a schedule already; drop {given.key + '_schedule'!r}")
        spec, fixed = fixed, default
    if spec is None and fixed is None:
        if warmup is not None:
            raise ValueError(f"is switched off, so {given.key + '_warmup_steps'!r} has nothing to warm up")
        return None
    schedule = parse_schedule(fixed if spec is None else spec, fixed=fixed)
    if warmup is None:
        return schedule
    if schedule.warmup is not None:
        raise ValueError(f"has a warm-up in its schedule already; drop {given.key + '_warmup_steps'!r}")
    if warmup in (0, "0%") and warmup is not False:
        return schedule
    try:
        return schedule.model_copy(update={"warmup": Warmup.model_validate({"steps": warmup})})
    except ValidationError:
        wanted = "env steps, or per cent of the horizon such as 5%"
        raise ValueError(f"{given.key + '_warmup_steps'!r} should be {wanted}, got {shown(warmup)}") from None


def to_int(value: float, low: float, high: float) -> int:
    return int(min(max(round(value), low), high))


class Field(NamedTuple):
    """One declared hyperparameter."""

    name: str
    hint: Any
    default: Any
    low: float
    high: float
    help: str
    is_scalar: bool
    auto: bool = False  # None is also spelt auto
    schedule: Callable[..., dict[str, Any]] | None = None  # of the default, from the settings its parameters name
    needs: tuple[str, Any] | None = None  # another one and its value, without which this has no effect

    @property
    def sources(self) -> tuple[str, ...]:
        """The settings that the default is made from."""
        return tuple(signature(self.schedule).parameters) if self.schedule else ()

    @property
    def optional(self) -> bool:
        """Whether None switches it off."""
        return type(None) in get_args(self.hint)

    def idle(self, values: Mapping[str, Any]) -> bool:
        return self.needs is not None and values.get(*self.needs) != self.needs[1]

    @property
    def is_int(self) -> bool:
        return int in (self.hint, *get_args(self.hint)) and float not in (self.hint, *get_args(self.hint))

    @property
    def bounds(self) -> str:
        low = "-inf" if self.low == -math.inf else f"{self.low:g}"
        return f"[{low}, {self.high:g}]" if self.high < math.inf else f">= {low}" if self.low > -math.inf else "any"


@lru_cache
def fields_of(hyperparameters: type, *, atari: bool = False) -> dict[str, Field]:
    """All hyperparameters by name. atari: with the defaults that go with Atari preprocessing."""
    hints = get_type_hints(hyperparameters)
    return {
        f.name: Field(
            f.name,
            hints[f.name],
            _default(f, atari=atari),
            f.metadata["low"],
            f.metadata["high"],
            f.metadata["help"],
            f.metadata["scalar"],
            f.metadata.get("auto", False),
            _default_schedule(f.metadata, atari=atari),
            f.metadata.get("needs"),
        )
        for f in dataclasses.fields(hyperparameters)
    }


def _default(field: dataclasses.Field[Any], *, atari: bool) -> Any:
    published = field.metadata.get("atari") if atari else None
    return field.default if published is None or callable(published) else published


def _default_schedule(metadata: Mapping[str, Any], *, atari: bool) -> Callable[..., dict[str, Any]] | None:
    """The schedule of a default; with Atari preprocessing its own, or none where the default is a number."""
    published = metadata.get("atari") if atari else None
    if callable(published):
        return cast(Callable[..., dict[str, Any]], published)
    return None if published is not None else metadata.get("schedule")


class Controls:
    """An algorithm's hyperparameters over the course of one run; all that is wrong with them is raised at once."""

    def __init__(self, hyperparameters: type, kwargs: Mapping[str, Any], horizon: int, *, atari: bool = False) -> None:
        self.hyperparameters, self.horizon = hyperparameters, horizon
        self.fields = fields_of(hyperparameters, atari=atari)
        self.scalars = scalar_names(hyperparameters)
        problems = unknown_keys(hyperparameters, kwargs) + unused_sources(self.fields, kwargs)
        self.schedules: dict[str, Schedule] = {}
        values: dict[str, Any] = {}
        for field in self.fields.values():
            try:
                values[field.name] = self._read(field, kwargs, values)
            except _Wrong as wrong:
                problems += wrong.problems
        if problems:
            raise ConfigError(Problem(("algo_kwargs", *p.path), p.message) for p in problems)
        self.varying = {name: schedule for name, schedule in self.schedules.items() if schedule.varies}
        self.initial = hyperparameters(**values)
        self.overrides: dict[str, Any] = {}  # values that were written during the run, in place of their schedules
        # Of a number and the settings that make its default schedule, only one may be given: the other is implied.
        made = [f for f in self.fields.values() if f.sources]
        self._implied = {x for f in made for x in (f.sources if is_given(f.name, kwargs) else (f.name,))}
        self._implied |= {f.name for f in self.fields.values() if f.idle(values)}
        self._given = {name for name in self.varying if is_given(name, kwargs)}

    @classmethod
    def of(cls, config: TrainConfig, hyperparameters: type, *, horizon: int | None = None) -> Controls:
        """Those of a config; over another horizon than its own, if one is given."""
        return cls(hyperparameters, config.algo_kwargs, horizon or config.horizon, atari=config.uses_atari)

    def at(self, step: int) -> Any:
        """The hyperparameters in force at `step`, as an instance of the algorithm's own class."""
        if not self.varying and not self.overrides:
            return self.initial
        hp: Any = object.__new__(self.hyperparameters)
        # Past the frozen class's guard and its __init__: dataclasses.replace costs 20 times as much, at every step.
        hp.__dict__.update(self.initial.__dict__)
        for name, schedule in self.varying.items():
            hp.__dict__[name] = self._value(self.fields[name], schedule, step)
        hp.__dict__.update(self.overrides)
        return hp

    def take_writes(self, learner: Any, in_force: Any) -> bool:
        """Let what was written to the learner since `in_force` became its `hp` hold from now on; False: nothing was.

        `learner.clip_coef = 0.1` and `learner.hp = dataclasses.replace(...)` are the same; settings stay fixed.
        """
        hp = learner.hp
        written = vars(learner).pop("written", set())
        if hp is in_force:
            return False
        if type(hp) is not self.hyperparameters:
            wanted = self.hyperparameters.__name__
            raise InputError(f"the learner's hp should be a {wanted}, got a {type(hp).__name__}")
        for name in self.fields:
            value, before = getattr(hp, name), getattr(in_force, name)
            if name in self.scalars and (name in written or value != before):
                self.overrides[name] = checked_scalar(hp, name, value)
            elif value != before:
                raise InputError(f"{name} is a setting, fixed for the whole run: it cannot become {value!r}")
        return True

    def state_dict(self) -> State:
        return {"overrides": dict(self.overrides)}

    def state_pattern(self) -> State:
        return {"overrides": {str: float | None}}

    def load_state_dict(self, state: State) -> None:
        for name, value in state["overrides"].items():
            if name not in self.scalars:
                raise InputError(f"overrides: {self.hyperparameters.__name__} has no scalar {name!r}")
            self.overrides[name] = checked_scalar(self.at(0), name, value)

    def idle_learning_rates(self, step: int) -> list[str]:
        """The learning rates that are 0 from `step` to the end of the run."""
        rates = [name for name in self.schedules if name.endswith("learning_rate") and name not in self.overrides]
        idle = [name for name in rates if is_zero_from(self.schedules[name], self.horizon, step)]
        return idle + [name for name, value in self.overrides.items() if name.endswith("learning_rate") and value == 0]

    def scalars_of(self, hp: Any) -> dict[str, float]:
        """Every scalar in force, under its own name; one that is switched off is left out."""
        return {name: value for name in self.scalars if (value := getattr(hp, name)) is not None}

    def extremes(self, name: str) -> tuple[float, float]:
        """The least and the greatest value of a scalar over the horizon."""
        field, schedule = self.fields[name], self.schedules[name]
        values = [self._value(field, schedule, step) for step in telling_steps(schedule, self.horizon)]
        return min(values), max(values)

    def warnings(self) -> list[str]:
        """What the config schedules to no effect, or not to its end: allowed, but hardly meant."""
        lines = []
        for name in sorted(self._given):
            low, high = self.extremes(name)
            if math.isclose(low, high, rel_tol=1e-9):
                lines.append(
                    f"{name} is scheduled, but stays {low:g} from the first step to the last: give another end"
                )
            elif (what := cut_short(self.schedules[name], self.horizon)) is not None:
                value = self._value(self.fields[name], self.schedules[name], self.horizon - 1)
                lines.append(f"{name}: {what}, the run only {self.horizon:,}: it comes no further than {value:g}")
        return lines

    def resolved(self) -> dict[str, Any]:
        """All hyperparameters with their defaults, as YAML that reads back to the same."""
        plain = {name: list(v) if isinstance(v := getattr(self.initial, name), tuple) else v for name in self.fields}
        plain |= {name: "auto" for name, field in self.fields.items() if field.auto and plain[name] is None}
        both = plain | {name: dump_schedule(schedule) for name, schedule in self.varying.items()}
        return {name: value for name, value in both.items() if name not in self._implied}

    def _read(self, field: Field, kwargs: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
        """One hyperparameter, given those declared before it."""
        if field.idle(before):
            return unused(field, kwargs)
        if not field.is_scalar:
            return read_setting(field, kwargs[field.name]) if field.name in kwargs else field.default
        if field.schedule is not None and not has_value(field.name, kwargs):
            if not before.keys() >= set(field.sources):
                raise _Wrong()  # one of them is wrong, which is reported there
            made = field.schedule(**{name: before[name] for name in field.sources})
            kwargs = {**kwargs, field.name: made}  # a warm-up may have been given
        schedule = read_scalar(field, kwargs, self.horizon)
        if schedule is None:
            return None
        self.schedules[field.name] = schedule
        return self._value(field, schedule, 0)

    def _value(self, field: Field, schedule: Schedule, step: int) -> float:
        value = schedule.at(step, self.horizon)
        return to_int(value, field.low, field.high) if field.is_int else min(max(value, field.low), field.high)


class _Wrong(Exception):
    def __init__(self, *problems: Problem) -> None:
        self.problems = problems


def read_scalar(field: Field, kwargs: Mapping[str, Any], horizon: int) -> Schedule | None:
    """The schedule of a declared scalar, checked against its bounds over the whole run."""
    key, given = field.name, None
    try:
        given = find(kwargs, field.name)
        if given is not None:
            key = given.key + next(part for part in ("_schedule", "", "_warmup_steps") if given.key + part in kwargs)
            if kwargs[key] is None and not field.optional:
                raise ValueError("should be a number or a schedule, got nothing")
            if field.auto and given.fixed == "auto":
                if given.schedule is not None:
                    raise ValueError(f"is auto, so {given.key + '_schedule'!r} has no effect: drop one of them")
                given = given._replace(fixed=None)
        off = given is not None and field.optional and given.fixed is None and given.key in kwargs
        schedule = read_schedule(given, None if off else field.default)
        if schedule is not None:
            check_order(schedule, horizon)
            check_bounds(field, schedule, horizon)
    except ValidationError as error:
        raise _Wrong(*problems_of(error, (key,), ALL_FIELDS)) from error
    except ValueError as error:
        raise _Wrong(Problem((key,), str(error))) from error
    return schedule


def check_bounds(field: Field, schedule: Schedule, horizon: int) -> None:
    """Integers that a schedule moves are kept in bounds, so for those only the sign can be wrong."""
    low = min(field.low, 0.0) if field.is_int and schedule.varies else field.low
    violation = first_violation(schedule, horizon, low=low, high=field.high)
    if violation is None:
        if field.is_int and not schedule.varies and schedule.at(0, horizon) % 1:
            raise ValueError(f"should be a whole number, got {schedule.at(0, horizon):g}")
        return
    step, value = violation
    when = f" at step {step:,} of {horizon:,}" if schedule.varies else ""
    remedy = (
        "; start the warm-up elsewhere with warmup: {steps: ..., from: ...}" if schedule.warmup and step == 0 else ""
    )
    raise ValueError(f"should be {field.bounds.replace('[', 'in [')}, got {value:.10g}{when}{remedy}")


def read_setting(field: Field, value: Any) -> Any:
    """A value that is fixed for the run, checked against its type and bounds."""
    if is_schedule(value) and not accepts(field.hint, value):
        raise _Wrong(Problem((field.name,), f"is a setting, so it {FIXED}"))
    try:
        value = adapter(field.hint).validate_python(value)
    except ValidationError as error:
        keys = value if isinstance(value, Mapping) else ()
        raise _Wrong(*problems_of(error, (field.name,), {}, keys)) from error
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float) and not field.low <= number <= field.high:
            raise _Wrong(Problem((field.name,), f"should be {field.bounds.replace('[', 'in [')}, got {shown(number)}"))
        if isinstance(number, int) and number > LARGEST_SETTING:
            raise _Wrong(Problem((field.name,), f"should be at most {LARGEST_SETTING:,}, got {shown(number)}"))
    return value


def is_schedule(value: Any) -> bool:
    """Whether a value reads like a schedule of some number."""
    if isinstance(value, Mapping):
        return not {"kind", *SYNONYMS}.isdisjoint(value)
    return isinstance(value, str) and value in KINDS


def known_keys(hyperparameters: type) -> list[str]:
    scalars = [name for scalar in scalar_names(hyperparameters) for name in names_of(scalar)]
    return [*fields_of(hyperparameters), *(name + part for name in scalars for part in PARTS)]


def unknown_keys(hyperparameters: type, kwargs: Mapping[str, Any]) -> list[Problem]:
    """A misspelt hyperparameter is an error, never a silently used default."""
    known = known_keys(hyperparameters)
    return [Problem((key,), unknown_key(str(key), known, "hyperparameter")) for key in kwargs if key not in known]


def unused(field: Field, kwargs: Mapping[str, Any]) -> Any:
    """The value of a hyperparameter that has no effect; to give it one is an error."""
    assert field.needs is not None
    for key in (field.name + part for part in PARTS):
        if kwargs.get(key) not in (None, "auto"):
            other, value = field.needs
            raise _Wrong(Problem((key,), f"has no effect without {other}: {'auto' if value is None else 'true'}"))
    return None if field.is_scalar else field.default


def unused_sources(fields: Mapping[str, Field], kwargs: Mapping[str, Any]) -> list[Problem]:
    """Settings that would make a default which is not used."""
    return [
        Problem((name,), f"has no effect, because {field.name} is given: drop one of them")
        for field in fields.values()
        for name in field.sources
        if name in kwargs and has_value(field.name, kwargs)
    ]


def resolve(config: TrainConfig, name: str, *, step: int, default: float) -> float:
    """The value of the number `name` at `step`; ValueError where it is negative."""
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
