"""The hyperparameters that an algorithm declares: names, types, defaults, bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, StrictBool, TypeAdapter

from rl_training.config import Float, Int
from rl_training.errors import SCHEDULE_PARTS

ALIASES = (("clip_coef", "clip_range"), ("ent_coef", "entropy_coef"))  # each group: names of one scalar
PARTS = ("", *SCHEDULE_PARTS)  # the keys of a scalar: its name followed by one of these


def names_of(name: str) -> tuple[str, ...]:
    """All names of the scalar `name`, itself first."""
    group = next((group for group in ALIASES if name in group), ())
    return (name, *(other for other in group if other != name))


def is_given(name: str, kwargs: Mapping[str, Any], parts: tuple[str, ...] = PARTS) -> bool:
    return any(n + part in kwargs for n in names_of(name) for part in parts)


class Hyperparameter(NamedTuple):
    """One declared hyperparameter: see `scalar` and `setting` in algorithms/base.py."""

    name: str
    hint: Any
    default: Any
    is_scalar: bool
    low: float
    high: float
    help: str
    needs: tuple[str, Any] | None = None  # another one and its value, without which this one has no effect
    auto: bool = False  # None is also spelt auto
    schedule: Callable[..., dict[str, Any]] | None = None  # the default, made from the settings that it takes
    is_int: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """The settings that the default schedule is made from."""
        return tuple(signature(self.schedule).parameters) if self.schedule else ()

    @property
    def optional(self) -> bool:
        """Whether None switches it off."""
        return type(None) in get_args(self.hint)

    @property
    def bounds(self) -> str:
        low = "-inf" if self.low == -math.inf else f"{self.low:g}"
        return f"[{low}, {self.high:g}]" if self.high < math.inf else f">= {low}" if self.low > -math.inf else "any"

    @property
    def config_default(self) -> Any:
        """The default as a config would spell it."""
        if self.schedule is not None:
            return self.schedule()
        if self.auto and self.default is None:
            return "auto"
        return list(self.default) if isinstance(self.default, tuple) else self.default

    @property
    def default_text(self) -> str:
        """The default in one line of YAML."""
        default = self.config_default
        if self.schedule is None:
            return str(default)
        return "{" + ", ".join(f"{key}: {value}" for key, value in default.items()) + "}"

    def has_effect(self, values: Mapping[str, Any]) -> bool:
        """With these `values` of others; one that is not among them counts as fulfilled."""
        if self.needs is None:
            return True
        name, wanted = self.needs
        return bool(values.get(name, wanted) == wanted)


@lru_cache
def hyperparameters_of(declaring: type, *, atari: bool = False) -> dict[str, Hyperparameter]:
    """All hyperparameters of a class by name; `atari`: with the defaults for Atari preprocessing."""
    hints = get_type_hints(declaring)
    return {f.name: _declared(f, hints[f.name], atari) for f in dataclasses.fields(declaring)}


def _declared(field: dataclasses.Field[Any], hint: Any, atari: bool) -> Hyperparameter:
    declared, default = dict(field.metadata), field.default
    is_scalar, on_atari = declared.pop("scalar"), declared.pop("atari")
    if atari and callable(on_atari):
        declared["schedule"] = on_atari
    elif atari and on_atari is not None:
        default = on_atari
        if is_scalar:
            declared["schedule"] = None
    types = (hint, *get_args(hint))
    is_int = int in types and float not in types
    return Hyperparameter(field.name, hint, default, is_scalar, is_int=is_int, **declared)


def type_name(hint: Any) -> str:
    """`float | None`, `tuple[int, ...]`, `rmsprop, adam` (the choices of a Literal)."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


@lru_cache
def adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(strict(hint))


def strict(hint: Any) -> Any:
    """A type without pydantic's conversions: true and "7" are not numbers, 1 is not true, and only a list is a list."""
    leaves = {int: Int, float: Float, bool: StrictBool}
    if hint in leaves:
        return leaves[hint]
    if get_origin(hint) is Literal or not get_args(hint):
        return hint
    arguments = tuple(each if each is Ellipsis else strict(each) for each in get_args(hint))
    if get_origin(hint) is tuple:
        return Annotated[tuple[arguments], BeforeValidator(_list)]  # type: ignore[valid-type]
    return Union[arguments] if get_origin(hint) in (Union, UnionType) else get_origin(hint)[arguments]  # noqa: UP007


def _list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("should be a list")
    return value
