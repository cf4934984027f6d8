"""The machine's RAM. Its size is compared with what a run will need before the run starts."""

from __future__ import annotations

import os
from pathlib import Path

CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def usable_bytes() -> int | None:
    """Bytes of RAM that this process may use: the machine's or its container's limit. None where they are unknown."""
    limits = [int(text) for path in CONTAINER_LIMITS if (text := _read(path)).isdigit()]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
