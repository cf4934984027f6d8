"""Numbers, durations and shares in few characters."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """At most nine characters with four significant digits; None is a hyperparameter that is switched off."""
    if value is None:
        return "off"
    if math.isnan(value):
        return "-"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1e5 else f"{value:,.1f}" if size >= 1e3 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    if seconds is None or seconds >= 360_000_000:
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"


def percent(step: int, total: int) -> str:
    return f"{min(100, 100 * step // max(1, total))}%"
