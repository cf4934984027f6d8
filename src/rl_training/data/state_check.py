"""Whether a state that was read from a file is one that a part can load: compared before anything is loaded."""

from __future__ import annotations

from types import UnionType
from typing import Any

import numpy as np
from torch import Tensor

ARRAY = np.ndarray | np.generic  # numpy gives a scalar where an array would have no axes
MOST = 2**63  # counters stay below; the numbers inside a generator's state need not


class StateMismatch(ValueError):
    """An entry of a state that is missing, unknown, or of another type, shape or dtype."""


def compare_state(expected: Any, found: Any, entry: str) -> None:
    """Raise a StateMismatch that names the first entry of `found` which is not like `expected`.

    `expected` is a state of the same part: keys, types, shapes and dtypes must agree, values need not; but tensors,
    which are weights, have no NaN. None, an empty dict and an empty list say nothing of what they will hold. Where a
    state varies, a type stands in place of a value: `int` (a counter), `float | None`, `np.ndarray`, `object`
    (anything); `[float]` and `{str: float}` are any number of them.
    """
    if isinstance(expected, type | UnionType):
        _compare_type(expected, found, entry)
    elif isinstance(expected, dict):
        _compare_dict(expected, found, entry)
    elif isinstance(expected, list | tuple):
        _compare_list(expected, found, entry)
    elif isinstance(expected, Tensor | ARRAY):
        _compare_array(expected, found, entry)
    elif expected is not None:
        _compare_value(expected, found, entry)


def _compare_dict(expected: dict[Any, Any], found: Any, entry: str) -> None:
    if not isinstance(found, dict):
        raise StateMismatch(f"{entry} should be a mapping, got {_describe(found)}")
    if list(expected) == [str]:
        expected = dict.fromkeys(found, expected[str])
    for key in expected.keys() - found.keys():
        raise StateMismatch(f"{entry}.{key} is missing")
    for key in found.keys() - expected.keys() if expected else ():
        raise StateMismatch(f"{entry}.{key} is not known here")
    for key, value in expected.items():
        compare_state(value, found[key], f"{entry}.{key}")


def _compare_list(expected: Any, found: Any, entry: str) -> None:
    if not isinstance(found, list | tuple):
        raise StateMismatch(f"{entry} should be a list, got {_describe(found)}")
    if len(expected) == 1 and isinstance(expected[0], type | UnionType):
        expected = [expected[0]] * len(found)
    if expected and len(expected) != len(found):
        raise StateMismatch(f"{entry} should have {len(expected)} items, got {len(found)}")
    for i, value in enumerate(expected):
        compare_state(value, found[i], f"{entry}.{i}")


def _compare_array(expected: Any, found: Any, entry: str) -> None:
    kind: Any = Tensor if isinstance(expected, Tensor) else ARRAY
    same = isinstance(found, kind) and found.dtype == expected.dtype and found.shape == expected.shape
    if not same:
        raise StateMismatch(f"{entry} should be {_describe(expected)}, got {_describe(found)}")
    if isinstance(found, Tensor) and found.is_floating_point() and found.isnan().any():
        raise StateMismatch(f"{entry} should be numbers, but some are NaN")


def _compare_type(expected: Any, found: Any, entry: str) -> None:
    if expected is int:
        _compare_value(0, found, entry)
    elif isinstance(found, bool) and not isinstance(True, expected):
        raise StateMismatch(f"{entry} should be {_name(expected)}, got {found}")
    elif type(found) is int and isinstance(0.0, expected):
        _compare_value(0.0, found, entry)
    elif not isinstance(found, expected):
        raise StateMismatch(f"{entry} should be {_name(expected)}, got {_describe(found)}")


def _compare_value(expected: Any, found: Any, entry: str) -> None:
    kinds = (int, float) if type(expected) is float else (type(expected),)
    if type(found) not in kinds:
        raise StateMismatch(f"{entry} should be of type {type(expected).__name__}, got {_describe(found)}")
    if type(found) is int and abs(found) >= MOST and abs(expected) < MOST:
        raise StateMismatch(f"{entry} should be less than 2^63, got {hex(found)}")
    if type(expected) is int and found < 0 <= expected:
        raise StateMismatch(f"{entry} should not be negative, got {found}")


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor | ARRAY):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
