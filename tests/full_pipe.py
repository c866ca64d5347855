"""A pipe that nobody reads, as the log of a process whose reader hangs."""

from __future__ import annotations

import fcntl
import os

PIPE = 4096
"""The least that a pipe holds."""


class FullPipe:
    """A pipe that has no room, until it is read."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE)
        assert os.write(writer, b"\n" * PIPE) == PIPE
        self._reader = os.fdopen(reader, "rb")
        self.writer = os.fdopen(writer, "wb", buffering=0)

    def rest(self) -> str:
        """What it has beyond what filled it, once all who write have closed it."""
        self.writer.close()
        return self._reader.read()[PIPE:].decode()

    def close(self) -> None:
        """Closes both ends."""
        self.writer.close()
        self._reader.close()
