"""What files hold, read again when they change.

In: paths, and how to load what they hold. Out: the present contents; those before, as long as new ones cannot be used
(in the middle of a rotation, say), which the log tells. `stat` tells that there is something new: a file that is
replaced, overwritten or, as in Kubernetes, behind a link that now leads elsewhere, has another identity, size or time.
Files that could not be used are also read again without that: what prevented it may have been something else, such as
a lack of file descriptors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Final, Generic, TypeVar

from attnserve_server.start_errors import StartError

T = TypeVar("T")

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""How long after files could not be used they are read again though they are the same."""


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
        self._retry = float("inf")
        self._error: str | None = None
        """Why the files could not be used when they were last read; None if they could."""
        self._has_changed(monotonic())
        self._contents = load()

    @property
    def current(self) -> T:
        """The contents: the same object for as long as the files have not changed."""
        now = monotonic()
        changed = self._has_changed(now)
        if changed or now >= self._retry:
            self._read_again(now, changed)
        return self._contents

    def reload_failed(self) -> bool:
        """Whether the files have changed and could not be used: then the contents are not what they say."""
        _ = self.current  # looks at the files
        return self._error is not None

    def _read_again(self, now: float, changed: bool) -> None:
        before, self._error = self._error, "a fault of the server"  # unless the following says otherwise
        self._retry = now + RETRY_S
        try:
            self._contents = self._load()
        except StartError as error:
            self._error = str(error)
            if changed or self._error != before:
                logger.error(f"{self._what} was not reloaded: {self._otherwise}", extra={"error": error})
        else:
            self._error, self._retry = None, float("inf")
            logger.info(f"{self._what} was reloaded")

    def _has_changed(self, now: float) -> bool:
        """Whether the files have changed since the last look: they are to be read after this, not before."""
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
