"""Work in parts on several cores, for compiled functions that release Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process: one that was forked has none of its parent's."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="rl_training")


def in_parts(work: Callable[[int, int], object], size: int, least: int) -> None:
    """work(begin, end) for parts of range(size), side by side as far as there are cores, none smaller than `least`."""
    count = size // least
    if count > 1:
        count = min(count, usable_cores())
    if count < 2:
        work(0, size)
        return
    edges = [size * part // count for part in range(count + 1)]
    list(_threads(os.getpid()).map(work, edges[:-1], edges[1:]))  # a list: exceptions come up here
