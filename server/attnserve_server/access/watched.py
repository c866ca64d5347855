"""What files hold, read again when they change.

In: paths, and how to load what they hold. Out: the present contents; those before, as long as new ones cannot be used
(in the middle of a rotation, say), which the log tells. `stat` tells that there is something new: a file that is
replaced, overwritten or, as in Kubernetes, behind a link that now leads elsewhere, has another identity, size or time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from attnserve_server.start_errors import StartError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Watched(Generic[T]):
    """What files hold, or held when they could last be used. Not for several threads at a time."""

    def __init__(
        self, what: str, otherwise: str, paths: Sequence[Path], load: Callable[[], T], interval: float = 0.0
    ) -> None:
        """Loads it; the files are looked at again at most every `interval` seconds. Raises StartError, as `load` does,
        if they cannot be used. `what` they hold, and what happens `otherwise`, is for the log.
        """
        self._what, self._otherwise = what, otherwise
        self._paths, self._load, self._interval = paths, load, interval
        self._seen: object = None
        self._looked = float("-inf")
        self._failed = False
        self._has_changed()
        self._contents = load()

    @property
    def current(self) -> T:
        """The contents: the same object for as long as the files have not changed."""
        if self._has_changed():
            self._failed = True
            try:
                self._contents = self._load()
            except StartError as error:
                logger.error(f"{self._what} was not reloaded: {self._otherwise}", extra={"error": error})
            else:
                self._failed = False
                logger.info(f"{self._what} was reloaded")
        return self._contents

    def reload_failed(self) -> bool:
        """Whether the files have changed and could not be used: then the contents are not what they say."""
        _ = self.current  # looks at the files
        return self._failed

    def _has_changed(self) -> bool:
        """Whether the files have changed since the last look: they are to be read after this, not before."""
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
