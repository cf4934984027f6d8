"""A schedule is one number as a function of the training step.

It runs over `duration` (default: the whole horizon), then holds its last value. Of length L, at s = min(step, L - 1),
progress = s / (L - 1), so `end` is reached on the last step. Durations are steps, or per cent of what contains them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from rl_training.config import MOST_STEPS, Float, Options
from rl_training.errors import nearest, problems_of, shown


def _amount(value: Any) -> int | str:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            percent = float(value.strip()[:-1])
        except ValueError:
            percent = math.nan
        if not 0 <= percent <= 100:
            raise ValueError("should be a per cent from 0% to 100%")
        return f"{percent:g}%"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or value != int(value):
        raise ValueError("should be a whole number of env steps, or per cent of the horizon such as 50%")
    if value > MOST_STEPS:
        raise ValueError(f"should be at most {MOST_STEPS:,} env steps")
    return int(value)


def _positive(value: Any) -> Any:
    if value in (0, "0%"):
        raise ValueError("should be more than 0")
    return value


Amount = Annotated[int | str, BeforeValidator(_amount), Field(json_schema_extra={"pattern": r"^[0-9.]+\s*%$"})]
Duration = Annotated[Amount, AfterValidator(_positive)]


def fraction(amount: int | str) -> float | None:
    """0.5 for "50%"; None for a number of steps."""
    return float(amount[:-1]) / 100 if isinstance(amount, str) else None


def length_of(duration: int | str, horizon: int) -> int:
    """A duration in env steps, at least 1."""
    part = fraction(duration)
    return max(1, round(part * horizon) if part is not None else int(duration))


def position_of(amount: int | str, length: int) -> float:
    """A point in time; 100% is the last step."""
    part = fraction(amount)
    return part * (length - 1) if part is not None else float(amount)


class Warmup(Options):
    """Approach the schedule from `from`: value = from + (value - from) * min((s + 1) / steps, 1)."""

    steps: Amount = Field(description="length in env steps, or per cent of the horizon")
    from_: Float = Field(0.0, alias="from", description="value at the start of the warm-up")


def _warmup(value: Any) -> Any:
    return value if isinstance(value, Mapping | Warmup) else {"steps": value}


class Schedule(Options):
    """The base of all kinds. A kind defines `value`, and `knots` if the value is not monotone."""

    needs: ClassVar[str | None] = None  # keys that the kind cannot do without, as an example for errors

    duration: Duration | None = Field(None, description="length; then the last value holds; default: whole horizon")
    warmup: Annotated[Warmup, BeforeValidator(_warmup)] | None = Field(None, description="ramp up from another value")

    def at(self, step: int, horizon: int) -> float:
        """The value in force at env step `step` of a run planned for `horizon` env steps."""
        step = min(max(step, 0), horizon - 1)
        length = self.length_in(horizon)
        value = self.value(min(step, length - 1), length)
        if self.warmup is None:
            return value
        share = min((step + 1) / length_of(self.warmup.steps, horizon), 1.0)
        return self.warmup.from_ + (value - self.warmup.from_) * share if share < 1 else value

    def length_in(self, horizon: int) -> int:
        return horizon if self.duration is None else length_of(self.duration, horizon)

    def value(self, s: int, length: int) -> float:
        """The value at step `s` of `length`, without warm-up."""
        raise NotImplementedError  # pragma: no cover

    def knots(self, length: int) -> Iterator[float]:
        """Between these steps, the first and the last, the value is monotone."""
        return iter(())

    def num_steps(self, length: int) -> int:
        """Steps until the last value is reached."""
        return length

    def check_order(self, length: int) -> None:
        """Raise a ValueError if points are not in order of time; whether 50% is before step 400, the length decides."""

    @property
    def last_value(self) -> float | None:
        """Where the next segment of a sequence starts by default; None: that segment must give its start."""
        return None

    @property
    def varies(self) -> bool:
        return True

    def critical_steps(self, horizon: int) -> list[int]:
        """Env steps in order, between which the value is monotone; many besides knots, as a warm-up bends the curve."""
        length, last = self.length_in(horizon), horizon - 1
        warmup = length_of(self.warmup.steps, horizon) if self.warmup else 0
        grid = (round(last * i / 1024) for i in range(1025))
        steps = {0, last, length - 1, warmup, *map(int, self.knots(length)), *grid}
        return sorted(step for step in steps if 0 <= step <= last)

    def first_violation(self, horizon: int, *, low: float, high: float) -> tuple[int, float] | None:
        """The first env step at which the value leaves [low, high], and that value; None if it never does.

        Rounding errors are allowed: values are clipped to their bounds where they are used.
        """
        slack = 1e-9 * max([1.0, *(abs(bound) for bound in (low, high) if math.isfinite(bound))])

        def bad(step: int) -> bool:
            value = self.at(step, horizon)
            return not (math.isfinite(value) and low - slack <= value <= high + slack)

        good = -1
        for step in self.critical_steps(horizon):
            if bad(step):
                while step - good > 1:  # bisect: the value is monotone here
                    middle = (good + step) // 2
                    good, step = (good, middle) if bad(middle) else (middle, step)
                return step, self.at(step, horizon)
            good = step
        return None

    def is_zero_from(self, step: int, horizon: int) -> bool:
        """Whether the value is 0 at `step` and at every later one."""
        first = min(step, horizon - 1)  # past the horizon the last value holds
        return not any(self.at(s, horizon) for s in (first, *self.critical_steps(horizon)) if s >= first)

    def overrun(self, horizon: int) -> str | None:
        """The part that lasts longer than the run, which therefore does not reach its end."""
        warmup = length_of(self.warmup.steps, horizon) if self.warmup else 0
        lengths = {"warm-up": warmup, "schedule": self.num_steps(self.length_in(horizon))}
        return next((f"its {part} takes {steps:,} steps" for part, steps in lengths.items() if steps > horizon), None)

    def dump(self) -> dict[str, Any]:
        """The mapping that `parse_schedule` reads back."""
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {"kind": data.pop("kind"), **data}


class Constant(Schedule):
    kind: Literal["constant"] = "constant"
    start: Float = Field(description="the constant value")

    def value(self, s: int, length: int) -> float:
        return self.start

    @property
    def last_value(self) -> float:
        return self.start

    @property
    def varies(self) -> bool:
        return self.warmup is not None


class Decay(Schedule):
    """From `start` to `end`. A kind defines the share of `start` that is left at a progress of 0 to 1."""

    start: Float = Field(description="value at the first step; default: the fixed value")
    end: Float = Field(0.0, description="value at the last step")

    def value(self, s: int, length: int) -> float:
        left = self.left(s / (length - 1) if length > 1 else 1.0)
        return self.start * left + self.end * (1.0 - left)

    def left(self, progress: float) -> float:
        raise NotImplementedError  # pragma: no cover

    @property
    def last_value(self) -> float:
        return self.end


class Linear(Decay):
    kind: Literal["linear"] = "linear"

    def left(self, progress: float) -> float:
        return 1.0 - progress


class Cosine(Decay):
    kind: Literal["cosine"] = "cosine"

    def left(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class Exponential(Decay):
    """e^(-rate * progress), shifted and scaled to run from start to end.

    With the default rate ln(start / end) this is the geometric interpolation start * (end / start)^progress.
    """

    kind: Literal["exponential"] = "exponential"
    rate: Float | None = Field(None, gt=0, le=100, description="decay rate; default: ln(start / end), 5 if undefined")

    def left(self, progress: float) -> float:
        rate = self.rate
        if rate is None:
            ratio = self.start / self.end if self.end else 0.0
            rate = math.log(ratio) if ratio > 0 and ratio != 1 else 5.0
        return math.expm1(-rate * (progress - 1)) / math.expm1(rate)


class Polynomial(Decay):
    kind: Literal["polynomial"] = "polynomial"
    power: Float = Field(2.0, gt=0, description="exponent of the remaining fraction; 1 is linear")

    def left(self, progress: float) -> float:
        return float((1.0 - progress) ** self.power)


class StepDecay(Schedule):
    kind: Literal["step"] = "step"
    needs: ClassVar[str | None] = "milestones: [50%, 75%] or every: 10%"
    start: Float = Field(description="value before the first drop; default: the fixed value")
    factor: Float = Field(0.1, ge=0, description="factor that each drop multiplies the value by")
    milestones: list[Amount] | None = Field(None, min_length=1, description="steps or per cent at which it drops")
    every: Duration | None = Field(None, description="interval between drops, in env steps or per cent")

    @model_validator(mode="after")
    def _one_rule(self) -> StepDecay:
        if (self.milestones is None) == (self.every is None):
            raise ValueError("a step schedule takes either milestones or every")
        return self

    def value(self, s: int, length: int) -> float:
        drops = s // length_of(self.every, length) if self.every is not None else 0
        drops += sum(s >= position_of(milestone, length) for milestone in self.milestones or ())
        try:
            return float(self.start * self.factor**drops)
        except OverflowError:
            return math.inf

    def knots(self, length: int) -> Iterator[float]:
        if self.every is not None:
            yield length_of(self.every, length)
        for milestone in self.milestones or ():
            yield math.ceil(position_of(milestone, length))


class Piecewise(Schedule):
    kind: Literal["piecewise"] = "piecewise"
    needs: ClassVar[str | None] = "points: [[0, 1.0], [50%, 0.5], [100%, 0.25]]"
    points: list[tuple[Amount, Float]] = Field(min_length=1, description="[when, value] pairs in order of time")
    interpolation: Literal["linear", "hold"] = Field("linear", description="between points; hold: the previous value")

    def value(self, s: int, length: int) -> float:
        times = [position_of(when, length) for when, _ in self.points]
        values = [value for _, value in self.points]
        i = bisect_right(times, s)  # the first point after s
        if i == 0:
            return values[0]
        if i == len(times) or self.interpolation == "hold":
            return values[i - 1]
        part = (s - times[i - 1]) / (times[i] - times[i - 1])
        return values[i - 1] * (1.0 - part) + values[i] * part

    def knots(self, length: int) -> Iterator[float]:
        for when, _ in self.points:
            yield math.ceil(position_of(when, length))

    def check_order(self, length: int) -> None:
        for (a, _), (b, _) in itertools.pairwise(self.points):
            if position_of(b, length) <= position_of(a, length):
                raise ValueError(f"points must be in order of time: {b} does not come after {a} in {length} steps")

    @property
    def last_value(self) -> float:
        return self.points[-1][1]


class Cyclic(Schedule):
    """start -> end -> start in every period; `decay` shrinks the swing from one period to the next."""

    kind: Literal["cyclic"] = "cyclic"
    needs: ClassVar[str | None] = "period: 10%"
    start: Float = Field(description="value at the start and end of a period; default: the fixed value")
    end: Float = Field(0.0, description="value in the middle of the first period")
    period: Duration = Field(description="length in env steps, or per cent of the horizon")
    shape: Literal["triangle", "cosine"] = Field("triangle", description="triangle wave or cosine wave")
    decay: Float = Field(1.0, ge=0, le=1, description="factor that the amplitude is multiplied by after each period")

    def value(self, s: int, length: int) -> float:
        cycle, place = divmod(s, length_of(self.period, length))
        phase = place / length_of(self.period, length)
        swing = 1.0 - abs(2.0 * phase - 1.0) if self.shape == "triangle" else 0.5 * (1 - math.cos(2 * math.pi * phase))
        swing *= self.decay**cycle
        return self.start * (1.0 - swing) + self.end * swing

    def knots(self, length: int) -> Iterator[float]:
        period = length_of(self.period, length)
        yield from (period // 2, (period + 1) // 2, period)


class Sequence(Schedule):
    """One schedule after another, each for its own duration; the last one may run to the end."""

    kind: Literal["sequence"] = "sequence"
    needs: ClassVar[str | None] = "segments: [{kind: linear, end: 0.1, duration: 50%}, {kind: constant}]"
    segments: list[Any] = Field(min_length=1, description="schedules in order; all but the last need a duration")

    @model_validator(mode="after")
    def _durations(self) -> Sequence:
        missing = [i for i, segment in enumerate(self.segments[:-1]) if segment.duration is None]
        if missing:
            raise ValueError(f"segment {missing[0] + 1} needs a duration; only the last can do without")
        total = sum(fraction(s.duration) or 0 for s in self.segments if s.duration is not None)
        if total > 1 + 1e-9:
            raise ValueError(f"the segments together last {100 * total:g}% of the horizon; at most 100% is possible")
        return self

    def _spans(self, length: int) -> Iterator[tuple[int, int, Schedule]]:
        """(first step, number of steps, schedule) of each segment."""
        first = 0
        for segment in self.segments:
            steps = max(1, length - first) if segment.duration is None else length_of(segment.duration, length)
            yield first, steps, segment
            first += steps

    def value(self, s: int, length: int) -> float:
        *earlier, last = self._spans(length)
        first, steps, segment = next(((f, n, x) for f, n, x in earlier if s < f + n), last)
        return segment.value(min(s - first, steps - 1), steps)

    def knots(self, length: int) -> Iterator[float]:
        for first, steps, segment in self._spans(length):
            yield from (first + knot for knot in (0, *segment.knots(steps), steps - 1))

    def num_steps(self, length: int) -> int:
        return sum(steps for _, steps, _ in self._spans(length))

    def check_order(self, length: int) -> None:
        for _, steps, segment in self._spans(length):
            segment.check_order(steps)

    def dump(self) -> dict[str, Any]:
        return super().dump() | {"segments": [segment.dump() for segment in self.segments]}

    @property
    def last_value(self) -> float | None:
        last: Schedule = self.segments[-1]
        return last.last_value


KINDS: dict[str, type[Schedule]] = {
    cls.model_fields["kind"].default: cls
    for cls in (Constant, Linear, Cosine, Exponential, Polynomial, StepDecay, Piecewise, Cyclic, Sequence)
}
ALL_FIELDS = {name: field for cls in KINDS.values() for name, field in cls.model_fields.items()}
SYNONYMS = {"type": "kind", "value": "start"}


def parse_schedule(spec: Any, *, fixed: float | None = None) -> Schedule:
    """Read a schedule as YAML spells it: a number, a kind, `{kind, ...}`, or a list of segments.

    `fixed` is the start where none is given. Raises ValueError, or its subclass ValidationError for wrong entries.
    """
    if isinstance(spec, Schedule):
        return spec
    if isinstance(spec, list):
        spec = {"kind": "sequence", "segments": spec}
    if isinstance(spec, Real) and not isinstance(spec, bool):  # numpy's numbers too
        return Constant(start=_number(spec))
    if isinstance(spec, str):
        cls = kind_of(spec)
        if cls.needs:
            raise ValueError(f"a {spec} schedule needs more than its name: write {{kind: {spec}, {cls.needs}}}")
        spec = {"kind": spec}
    if not isinstance(spec, Mapping):
        raise ValueError(f"a schedule is a number, a kind or a mapping, got {shown(spec)}")
    mapping = _canonical(spec)
    if "kind" not in mapping and not mapping.keys() <= Constant.model_fields.keys():
        raise ValueError(f"a schedule needs a kind: {', '.join(KINDS)}")
    cls = kind_of(mapping.setdefault("kind", "constant"))
    if "start" in cls.model_fields and "start" not in mapping and fixed is not None:
        mapping["start"] = fixed
    if cls is Sequence:
        mapping["segments"] = _segments(mapping.get("segments"), mapping.pop("start", fixed))
    return cls.model_validate(mapping)


def _number(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"should be a number below 1e308, got {shown(value)}") from None


def kind_of(name: Any) -> type[Schedule]:
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"unknown schedule kind {shown(name)}{nearest(shown(name), KINDS)}; kinds: {', '.join(KINDS)}")
    return KINDS[name]


def _canonical(spec: Mapping[str, Any]) -> dict[str, Any]:
    mapping = dict(spec)
    for synonym, name in SYNONYMS.items():
        if synonym in mapping:
            if name in mapping:
                raise ValueError(f"{synonym!r} is another name for {name!r}: give one of them")
            mapping[name] = mapping.pop(synonym)
    return mapping


def _segments(specs: Any, start: float | None) -> list[Schedule]:
    if not isinstance(specs, list) or not specs:
        raise ValueError("a sequence needs segments: a list of schedules")
    segments: list[Schedule] = []
    for i, spec in enumerate(specs):
        try:
            segments.append(parse_schedule(spec, fixed=start))
        except ValidationError as error:
            (path, message), *_ = problems_of(error, (), ALL_FIELDS)
            key = f"{'.'.join(map(str, path))}: " if path else ""
            raise ValueError(f"segment {i + 1}: {key}{message}") from error
        except ValueError as error:
            raise ValueError(f"segment {i + 1}: {error}") from error
        if segments[-1].warmup is not None:
            raise ValueError(f"segment {i + 1}: warm-up belongs to the sequence, not to a segment")
        start = segments[-1].last_value
    return segments
