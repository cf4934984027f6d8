"""The search space of `tune`: for keys of the config, the values to try.

`algo_kwargs.learning_rate: {log: [1e-5, 1e-2]}` is a distribution, and
`{kind: [linear, cosine], start: {log: [1e-4, 1e-2]}, end: 0}` a schedule whose kind and numbers are tried.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rl_training.errors import ConfigError, Problem, nearest, shown
from rl_training.runtime.controls import schedule_keys
from rl_training.runtime.hyperparameters import Hyperparameter, hyperparameters_of, names_of
from rl_training.runtime.registry import ALGORITHMS

ROOTS = ("algo_kwargs", "env_kwargs", "execution", "num_envs")
RANGES = ("log", "uniform", "int", "int_log")
DISTRIBUTIONS = (*RANGES, "choice")
FORMS = (
    "write {log: [1e-5, 1e-2]}, {uniform: [0, 1]}, {int: [1, 10]}, {int_log: [16, 1024]}, {choice: [a, b]}, "
    "or a schedule {kind: [linear, cosine], start: {log: [1e-4, 1e-2]}, end: 0}"
)


class Trial(Protocol):
    """The part of optuna.Trial that draws values."""

    def suggest_float(self, name: str, low: float, high: float, *, step: Any = None, log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


@dataclass(frozen=True)
class Range:
    kind: str
    low: float
    high: float
    step: float | None = None

    def suggest(self, trial: Trial, name: str) -> Any:
        if self.kind in ("int", "int_log"):
            log = self.kind == "int_log"
            return trial.suggest_int(name, int(self.low), int(self.high), step=int(self.step or 1), log=log)
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.kind == "log")

    def params_of(self, value: Any, name: str) -> dict[str, Any]:
        """The parameters with which `suggest` gives `value`; none if it cannot."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            return {}
        if self.step is not None and not math.isclose((value - self.low) % self.step, 0, abs_tol=1e-12):
            return {}
        return {name: int(value) if self.kind in ("int", "int_log") else float(value)}


@dataclass(frozen=True)
class CategoricalChoice:
    options: tuple[Any, ...]

    @property
    def labels(self) -> list[Any]:
        """The options as Optuna stores them: lists and mappings as text."""
        return [label(option) for option in self.options]

    def suggest(self, trial: Trial, name: str) -> Any:
        chosen = trial.suggest_categorical(name, self.labels)
        return copy.deepcopy(self.options[self.labels.index(chosen)])

    def params_of(self, value: Any, name: str) -> dict[str, Any]:
        text = label(list(value) if isinstance(value, tuple) else value)
        return {name: text} if any(text == each and type(text) is type(each) for each in self.labels) else {}


@dataclass(frozen=True)
class ScheduleSpace:
    """A schedule: some of its entries are drawn, the others are fixed. A kind gets those entries that it knows."""

    kinds: tuple[str, ...]
    entries: dict[str, Any]  # values, distributions, and mappings of these

    def suggest(self, trial: Trial, name: str) -> dict[str, Any]:
        one = len(self.kinds) == 1
        kind = self.kinds[0] if one else trial.suggest_categorical(f"{name}.kind", list(self.kinds))
        known = {key: entry for key, entry in self.entries.items() if key in schedule_keys(kind)}
        drawn: dict[str, Any] = _suggest_entries(trial, name, known)
        return {"kind": kind, **drawn}

    def params_of(self, value: Any, name: str) -> dict[str, Any]:
        given = dict(value) if isinstance(value, Mapping) else {"kind": "constant", "start": value}
        if given.get("kind") not in self.kinds:
            return {}
        found = {} if len(self.kinds) == 1 else {f"{name}.kind": given["kind"]}
        for key, entry in self.entries.items():
            if isinstance(entry, Range | CategoricalChoice) and key in given:
                found |= entry.params_of(given[key], f"{name}.{key}")
        return found


Node = Range | CategoricalChoice | ScheduleSpace


def _suggest_entries(trial: Trial, name: str, entry: Any) -> Any:
    if isinstance(entry, Range | CategoricalChoice):
        return entry.suggest(trial, name)
    if isinstance(entry, Mapping):
        return {key: _suggest_entries(trial, f"{name}.{key}", each) for key, each in entry.items()}
    return entry


def label(option: Any) -> Any:
    return option if option is None or isinstance(option, bool | int | float | str) else json.dumps(option)


class Space:
    """The nodes of a search space by key, for configs of one algorithm."""

    def __init__(self, spec: Any, algo: str) -> None:
        """Raises a ConfigError with all problems of the `tune` of a config."""
        self.spec = spec
        self.declared = hyperparameters_of(ALGORITHMS[algo].recipe.hyperparameters) if algo in ALGORITHMS else {}
        self.nodes: dict[str, Node] = {}
        if not isinstance(spec, Mapping):
            raise ConfigError.of(f"should be a mapping from keys of the config to distributions: {FORMS}", "tune")
        problems = []
        for key, given in spec.items():
            try:
                check_key(key, spec)
                self.nodes[key] = parse_node(key, given)
            except ValueError as error:
                problems.append(Problem(("tune", str(key)), str(error)))
        if problems:
            raise ConfigError(problems)

    def apply(self, data: Mapping[str, Any], trial: Trial, only: str | None = None) -> dict[str, Any]:
        """A copy of a config's data with values that `trial` draws, for all keys or one.

        A hyperparameter is drawn after the one that it needs, and not at all where it would have no effect.
        """
        drawn: dict[str, Any] = copy.deepcopy(dict(data))
        for key in sorted(self.nodes, key=lambda key: self.needed_by(key) is not None):
            if only in (None, key) and self.has_effect(key, drawn):
                put(drawn, key, self.nodes[key].suggest(trial, key))
        return drawn

    def needed_by(self, key: str) -> tuple[str, Any] | None:
        """(another hyperparameter, its value), without which this one has no effect."""
        declared = self.hyperparameter(key)
        return declared.needs if declared is not None else None

    def hyperparameter(self, key: str) -> Hyperparameter | None:
        root, _, rest = key.partition(".")
        names = names_of(rest.partition(".")[0]) if root == "algo_kwargs" else ()
        return next((self.declared[name] for name in names if name in self.declared), None)

    def has_effect(self, key: str, data: Mapping[str, Any]) -> bool:
        needs = self.needed_by(key)
        if needs is None:
            return True
        other, wanted = needs
        value = data.get("algo_kwargs", {}).get(other, self.declared[other].default)
        return bool((None if value == "auto" else value) == wanted)

    def params_of(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of the config's own values, as far as the space has them."""
        found: dict[str, Any] = {}
        for key, node in self.nodes.items():
            declared = self.hyperparameter(key)
            default = declared.config_default if declared is not None else None
            if self.has_effect(key, data):
                found |= node.params_of(get(data, key, default), key)
        return found


def check_key(key: Any, spec: Mapping[Any, Any]) -> None:
    if not isinstance(key, str):
        raise ValueError("keys are those of the config, such as algo_kwargs.learning_rate")
    root, _, rest = key.partition(".")
    if root == "seed":
        raise ValueError("is not tuned: each trial is the mean of its seeds, see --seeds")
    if root not in ROOTS:
        guess = f"; did you mean 'algo_kwargs.{key}'?" if not rest else nearest(root, ROOTS)
        raise ValueError(f"cannot be tuned, only keys of {', '.join(ROOTS)}{guess}")
    if (root == "num_envs") == bool(rest) or not all(key.split(".")):
        raise ValueError("should name one key, such as algo_kwargs.learning_rate")
    inner = next((each for each in spec if isinstance(each, str) and each.startswith(f"{key}.")), None)
    if inner is not None:
        raise ValueError(f"is tuned as a whole, and {inner} as a part of it: drop one of them")


def parse_node(key: str, given: Any) -> Node:
    if not isinstance(given, Mapping):
        remedy = f"write {{choice: {shown(given)}}}" if isinstance(given, list) else "write it into the config itself"
        raise ValueError(f"{shown(given)} is no distribution: {remedy}, or {FORMS}")
    if "kind" not in given:
        return parse_distribution(given)
    parts = key.split(".")
    if parts[0] != "algo_kwargs" or len(parts) != 2:
        raise ValueError("only a hyperparameter in algo_kwargs can be a schedule")
    return parse_schedule_space(given)


def parse_schedule_space(given: Mapping[str, Any]) -> ScheduleSpace:
    listed = given["kind"]
    if isinstance(listed, Mapping) and set(listed) == {"choice"}:
        listed = listed["choice"]
    kinds = listed if isinstance(listed, list) else [listed]
    known: set[str] = set()
    for kind in kinds:
        known |= schedule_keys(kind)  # a ValueError names an unknown kind
    if not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(f"kind should be a kind, or a list of different kinds, got {shown(listed)}")
    for key in given:
        if key not in known:
            of = f"{kinds[0]} has" if len(kinds) == 1 else f"none of {', '.join(kinds)} has"
            raise ValueError(f"{of} no key {shown(key)}{nearest(str(key), known)}")
    return ScheduleSpace(tuple(kinds), {key: parse_entry(key, each) for key, each in given.items() if key != "kind"})


def parse_entry(name: str, given: Any) -> Any:
    """An entry of a schedule: a distribution, a mapping of entries, or a fixed value."""
    if not isinstance(given, Mapping):
        return given
    try:
        if any(key in DISTRIBUTIONS for key in given):
            return parse_distribution(given)
        return {key: parse_entry(key, each) for key, each in given.items()}
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def parse_distribution(given: Mapping[str, Any]) -> Range | CategoricalChoice:
    kinds = [key for key in given if key in DISTRIBUTIONS]
    if len(kinds) != 1:
        unknown = next((str(key) for key in given if key not in (*DISTRIBUTIONS, "step")), "")
        raise ValueError(f"should be one distribution{nearest(unknown, DISTRIBUTIONS)}: {FORMS}")
    kind = kinds[0]
    more = set(given) - {kind, *(["step"] if kind in ("int", "uniform") else [])}
    if more:
        raise ValueError(f"{kind} does not take {', '.join(map(shown, sorted(map(str, more))))}")
    return parse_choice(given[kind]) if kind == "choice" else parse_range(kind, given[kind], given.get("step"))


def parse_choice(options: Any) -> CategoricalChoice:
    if not isinstance(options, list) or len(options) < 2:
        raise ValueError(f"choice should be a list of at least two values, got {shown(options)}")
    labels = [json.dumps(option) for option in options]
    twice = next((text for text in labels if labels.count(text) > 1), None)
    if twice is not None:
        raise ValueError(f"choice has {twice} twice")
    return CategoricalChoice(tuple(options))


def parse_range(kind: str, bounds: Any, step: Any) -> Range:
    numbers = [bounds, step] if not isinstance(bounds, list) else [*bounds, *([] if step is None else [step])]
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(is_finite, numbers)):
        raise ValueError(f"{kind} should be two numbers [low, high], got {shown(bounds)}")
    low, high = bounds
    if kind in ("int", "int_log") and any(number % 1 for number in numbers):
        raise ValueError(f"{kind} takes whole numbers, got {shown(numbers)}")
    if not low < high:
        raise ValueError(f"{kind} should be [low, high] with low < high, got {shown(bounds)}")
    if kind in ("log", "int_log") and low <= 0:
        raise ValueError(f"{kind} takes numbers above 0, got {shown(bounds)}")
    if step is not None and not 0 < step <= high - low:
        raise ValueError(f"step should be above 0 and at most high - low, got {shown(step)}")
    return Range(kind, low, high, step)


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, making the mappings around it."""
    *outer, last = key.split(".")
    for part in outer:
        inner = data.get(part)
        data[part] = dict(inner) if isinstance(inner, Mapping) else {}
        data = data[part]
    data[last] = value


def get(data: Any, key: str, default: Any) -> Any:
    """The value of a dotted key; a hyperparameter may stand under another of its names."""
    *outer, last = key.split(".")
    for part in outer:
        data = data.get(part) if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping):
        return default
    return next((data[name] for name in names_of(last) if name in data), default)


class Pick:
    """Draws the first, the last or a given option of everything: the corners of a space."""

    def __init__(self, side: int, given: Mapping[str, Any] | None = None) -> None:
        self.side, self.given = side, given or {}
        self.asked: dict[str, list[Any]] = {}  # by name: the extreme values

    def _pick(self, name: str, ends: list[Any]) -> Any:
        self.asked[name] = ends
        return self.given.get(name, ends[self.side])

    def suggest_float(self, name: str, low: float, high: float, *, step: Any = None, log: bool = False) -> float:
        return float(self._pick(name, [low, high]))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._pick(name, [low, high]))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._pick(name, list(choices))


def corners(space: Space, data: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """Configs in which one key has its extreme values, and each of its options; the others are as in `data`."""
    first = Pick(0)
    space.apply(data, first, only=key)
    sides = (0, -1) if len(first.asked) > 1 else (0,)  # of the other parameters of the key
    done = set()
    waiting = [(name, value) for name, ends in first.asked.items() for value in ends]
    while waiting:
        name, value = waiting.pop()
        if (name, json.dumps(value)) in done:
            continue
        done.add((name, json.dumps(value)))
        for side in sides:
            pick = Pick(side, {name: value})
            yield space.apply(data, pick, only=key)
            waiting += [(other, end) for other, ends in pick.asked.items() for end in ends]
