"""The thread that writes log lines: whoever reads them slowly, or not at all, holds up nobody else.

In: log records, from any thread. Out: their lines on a stream, in order. What waits to be written is bounded; lines
beyond the bound are left out, counted, and spoken of in a line of their own once others are written again.

A full pipe blocks whoever writes to it. If that were the event loop, the server would stop; and so would all threads
with something to log, since they would wait for the lock of the handler that writes.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, NamedTuple, TextIO, TypeAlias

MAX_WAITING: Final = 1 << 20
"""The most characters that wait to be written: some five thousand lines."""
PATIENCE_S: Final = 2.0
"""How long an ending process waits until its lines are written."""

logger = logging.getLogger(__name__)

_Write: TypeAlias = Callable[[str], object]


class _Line(NamedTuple):
    text: str
    left_out: int
    """How many lines had been left out before it."""


class LogWriter(logging.Handler):
    """A handler for a stream. Its lines have been written when `flush` returns, unless that took too long."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._write = _writing_to(stream)
        # This kind of queue is reentrant, as logging is: lines also come from signal handlers, and from objects as they
        # are freed.
        self._lines: SimpleQueue[_Line | threading.Event | None] = SimpleQueue()
        # Each of these is changed by one side only: the first two under the handler's lock, the next three by the
        # thread.
        self._queued = 0
        self._refused = 0
        self._written = 0
        self._failed = 0
        self._told = 0
        self._stuck_at: int | None = None
        """What had been written when `flush` last waited in vain."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="attnserve-log", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """How many lines were not written so far: there was no room for them, or the stream failed."""
        return self._refused + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record's line, if there is room."""
        try:
            text = f"{self.format(record)}\n"
        except Exception:  # logging by itself would write to standard error, at once
            text = f"{self.format(self._record('a line of %s cannot be written', record.name, fault=True))}\n"
        waiting = self._queued - self._written
        if self._ended:  # at the very end of the process, when there is no thread any more
            if not self._stuck:
                self._write_out(text)
        elif waiting and waiting + len(text) > MAX_WAITING:
            self._refused += 1
        else:
            self._queued += len(text)
            self._lines.put(_Line(text, self._refused))

    def flush(self) -> None:
        """Waits until all is written that was logged before, for `PATIENCE_S` at most; not at all if nothing has been
        written since it waited in vain.
        """
        if self._ended or self._stuck:
            return
        written = threading.Event()
        self._lines.put(written)
        if not written.wait(PATIENCE_S):
            self._stuck_at = self._written

    @property
    def _stuck(self) -> bool:
        return self._stuck_at == self._written

    def close(self) -> None:
        """Ends the thread when all is written. Lines that come later are written by those who log them."""
        self.flush()
        self._ended = True
        self._lines.put(None)
        super().close()

    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            if isinstance(item, _Line):
                self._tell(item.left_out)
                self._failed += not self._write_out(item.text)
                self._written += len(item.text)
            if self._lines.empty():
                self._tell(self._refused)
            if isinstance(item, threading.Event):
                item.set()

    def _tell(self, refused: int) -> None:
        """Writes a line that says how many are missing here, if any are missing that no such line has told of."""
        missing = refused + self._failed - self._told
        if missing > 0:
            record = self._record("%d log lines were left out: they could not be written in time", missing)
            record.left_out = missing
            if self._write_out(f"{self.format(record)}\n"):
                self._told += missing

    def _write_out(self, text: str) -> bool:
        """Writes to the stream; returns whether it could. A full disk may have room again, a closed pipe never has."""
        try:
            self._write(text)
        except (OSError, ValueError):  # the latter from a stream that is closed
            return False
        return True

    def _record(self, message: str, *args: object, fault: bool = False) -> logging.LogRecord:
        level = logging.ERROR if fault else logging.WARNING
        return logger.makeRecord(logger.name, level, __file__, 0, message, args, sys.exc_info() if fault else None)


def _writing_to(stream: TextIO | None) -> _Write:
    """What writes to a stream. None is the standard error of a process that has none.

    A file is written to without the stream's own buffer. Otherwise the thread would hold the buffer's lock while it
    waits for a full pipe, and Python, which takes that lock as it ends, would abort.
    """
    if stream is None:
        return lambda text: None
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):  # a stream in memory
        return lambda text: (stream.write(text), stream.flush())
    encoding, errors = stream.encoding, stream.errors or "strict"

    def write(text: str) -> None:
        rest = memoryview(text.encode(encoding, errors))
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # whoever started the process has made the pipe so
                waiting = select.poll()
                waiting.register(descriptor, select.POLLOUT)
                waiting.poll()

    return write
