"""A file of a run's log."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path


class LogFile:
    """A file to append to. A failed write is repeated by the next flush, with one warning: a log must not end a run."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self._file = open(path, mode, buffering=0)  # noqa: SIM115 - closed by close()
        self._waiting = bytearray()
        self._warned = False

    def write(self, data: bytes) -> int:
        self._waiting += data
        return len(data)

    def flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if not self._warned:
                self._warned = True
                cause = error.strerror or error
                warnings.warn(f"{self.path} cannot be written ({cause}); training continues", stacklevel=2)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(OSError):
            self._file.close()
