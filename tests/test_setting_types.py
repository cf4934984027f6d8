"""Settings take what their type says and nothing that merely looks like it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import pytest

from rl_training import ALGORITHMS, ConfigError
from rl_training.algorithms.base import setting
from rl_training.runtime.controls import Controls
from rl_training.runtime.hyperparameters import hyperparameters_of


@dataclass(frozen=True)
class Settings:
    count: int = setting(3, "a whole number", low=1)
    size: int | None = setting(None, "a whole number or nothing", low=1)
    share: float = setting(0.5, "a number")
    limit: float | None = setting(None, "a number or nothing")
    switch: bool = setting(False, "a switch")
    sizes: tuple[int, ...] = setting((8, 8), "a list", low=1)
    choice: Literal["a", "b"] = setting("a", "a choice")
    returns: dict[str, float] | None = setting(None, "by name")  # noqa: RUF009 - nothing writes to it


def value_of(name, value):
    return getattr(Controls(Settings, {name: value}, 1000).initial, name)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("count", 7, 7),
        ("count", 1e3, 1000),
        ("size", 7, 7),
        ("size", 1e3, 1000),
        ("size", None, None),
        ("share", 2, 2.0),
        ("limit", 2, 2.0),
        ("limit", None, None),
        ("switch", True, True),
        ("sizes", [4, 2.0], (4, 2)),
        ("sizes", (), ()),
        ("choice", "b", "b"),
        ("returns", {"CartPole-v1": 475, "int": 1.5}, {"CartPole-v1": 475.0, "int": 1.5}),
    ],
)
def test_what_is_taken(name, value, read):
    found = value_of(name, value)
    assert found == read
    assert type(found) is type(read)


@pytest.mark.parametrize(
    ("name", "value", "at"),
    [
        *[(name, value, name) for name in ("count", "size", "share", "limit") for value in (True, "7", [7], b"7")],
        *[(name, value, name) for name in ("count", "size") for value in (7.5, math.nan, math.inf, 2**31, 0)],
        *[(name, value, name) for name in ("share", "limit") for value in (math.nan, math.inf)],
        *[("switch", value, "switch") for value in (1, 0, "true", "yes", None)],
        *[("sizes", [8, value], "sizes.1") for value in (True, "8", None, 7.5)],
        *[("sizes", value, "sizes") for value in ({8}, {8: 8}, "88", 8, None)],
        *[("choice", value, "choice") for value in (True, 1, "c", None)],
        *[("returns", {"CartPole-v1": value}, "returns.CartPole-v1") for value in (True, "475", None, math.nan)],
        ("returns", [["CartPole-v1", 3]], "returns"),
    ],
    ids=str,
)
def test_what_is_refused_and_where(name, value, at):
    with pytest.raises(ConfigError) as caught:
        value_of(name, value)
    assert str(caught.value).startswith(f"algo_kwargs.{at}: should be")


NUMBERS = [
    (algo, field.name)
    for algo, entry in ALGORITHMS.items()
    for field in hyperparameters_of(entry.recipe.hyperparameters).values()
    if not field.is_scalar and {int, float} & {field.hint, *getattr(field.hint, "__args__", ())}
]


@pytest.mark.parametrize(("algo", "name"), NUMBERS)
def test_no_number_of_an_algorithm_is_a_switch_or_a_text(algo, name):
    for value in (True, "1"):
        with pytest.raises(ConfigError, match=f"algo_kwargs.{name}"):
            Controls(ALGORITHMS[algo].recipe.hyperparameters, {name: value}, 1000)


@pytest.mark.parametrize("value", [{"kind": "linear", "start": 1, "end": 2}, {"type": "linear"}, "linear"])
@pytest.mark.parametrize("name", ["count", "size", "limit", "sizes", "switch", "choice"])
def test_a_setting_that_is_given_a_schedule_says_that_it_takes_none(name, value):
    for key in (name, f"{name}_schedule"):
        with pytest.raises(ConfigError, match=f"algo_kwargs.{key}: .*fixed for the whole run and cannot be scheduled"):
            Controls(Settings, {key: value}, 1000)
