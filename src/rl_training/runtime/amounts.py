"""Amounts of training time as a config gives them: env steps (`20_000`), or per cent (`25%`) of a length."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from rl_training.config import MOST_STEPS


def _amount(value: Any) -> Any:
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


Amount = Annotated[
    int | str,
    BeforeValidator(_amount),
    Field(json_schema_extra={"pattern": r"^[0-9.]+\s*%$"}),
]


def _positive(value: Any) -> Any:
    if value in (0, "0%"):
        raise ValueError("should be more than 0")
    return value


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
