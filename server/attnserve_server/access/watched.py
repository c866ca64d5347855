"""Files that are read again when they change.

In: paths. Out: whether there is something new to read. `stat` tells: a file that is replaced, overwritten or, as in
Kubernetes, behind a link that now leads elsewhere, has another identity, size or time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic


class WatchedFiles:
    """Files, checked at most every `interval` seconds. The first call of `changed` returns True."""

    def __init__(self, paths: Sequence[Path], interval: float = 0.0) -> None:
        self._paths = paths
        self._interval = interval
        self._looked = float("-inf")
        self._seen: object = None

    def changed(self) -> bool:
        """Whether the files have changed since the last call. Read them after calling this, not before."""
        now = monotonic()
        if now - self._looked < self._interval:
            return False
        self._looked = now
        seen, self._seen = self._seen, [_identity(path) for path in self._paths]
        return seen != self._seen


def _identity(path: Path) -> object:
    try:
        status = os.stat(path)
    except OSError as error:
        return error.errno
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
