"""Log lines, for people or for machines, on standard error.

In: records of the standard `logging`, with fields in `extra`. Out: one line each, `time level logger message
key=value` or a JSON object; a traceback follows as lines of its own, or as a field. What callers send never shows: of
bytes, arrays and messages, only the size or the name is written, in fields and in a message's arguments alike. A
recurring warning or error is rate-limited; the lines that are written say how many were left out. Python's own warnings
and uncaught exceptions are lines, too. A thread writes them (see `log_writer`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from time import monotonic
from types import TracebackType
from typing import Any, Final, TextIO

from google.protobuf.message import Message

from attnserve_server.observability.log_writer import LogWriter
from attnserve_server.observability.rate_limit import RateLimit

LINES_PER_SECOND: Final = 1.0
"""The rate of warnings and errors from one place, in the long run: their tracebacks are long."""
BURST: Final = 20.0

logger = logging.getLogger(__name__)

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Sends the log records of at least this level to a stream (standard error) as `text` or `json`, and only there."""
    out = LogWriter(stream or sys.stderr)
    out.addFilter(soften)
    out.addFilter(Throttle())
    out.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[out], force=True)


def writers() -> Iterator[LogWriter]:
    """The log writers that `configure` has set up."""
    return (handler for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))


def flush() -> None:
    """Waits until all lines so far are written, for a time: before something else is written to the same place."""
    for writer in writers():
        writer.flush()


def left_out() -> int:
    """How many lines have not been written because nobody read them in time, or because that failed."""
    return sum(writer.left_out for writer in writers())


def take_over() -> None:
    """Logs all that Python itself would write to standard error: warnings, and exceptions that nobody catches, in the
    main thread, in others, and where none can be raised.
    """
    warnings.showwarning = _warned
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # The record is from where the warning is from, for the limit of each place.
    if logger.isEnabledFor(logging.WARNING):
        text = "%s: %s (%s:%d)", (category.__name__, str(message), filename, lineno)
        logger.handle(logger.makeRecord(logger.name, logging.WARNING, filename, lineno, *text, None))


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logger.critical("uncaught exception", exc_info=(kind, error, traceback))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else ""
        exc_info = args.exc_type, args.exc_value, args.exc_traceback
        logger.error("uncaught exception in thread %s", name, exc_info=exc_info)


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    if args.exc_value is not None:
        exc_info = args.exc_type, args.exc_value, args.exc_traceback
        where = getattr(args.object, "__qualname__", args.object)
        logger.error("%s %s", args.err_msg or "exception ignored in", where, exc_info=exc_info)


def shown(value: object) -> Any:
    """What a log line shows of a value: numbers, text and names as they are, and payloads only by their size."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Message):
        return f"<{value.DESCRIPTOR.full_name}>"
    size = len(value) if isinstance(value, bytes | bytearray) else getattr(value, "nbytes", None)
    return f"<{type(value).__name__}>" if size is None else f"<{type(value).__name__} of {size} bytes>"


def _printable(text: str, escape: Callable[[str], str]) -> str:
    """The text, with what is not printable escaped. Otherwise a caller could write log lines of its own by sending a
    line break of any kind, and have a terminal do what it likes by sending an escape sequence.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else escape(character) for character in text)


def soften(record: logging.LogRecord) -> bool:
    """Reduces to one line what gRPC logs as a fault of the server, with a traceback. That is, first, that an RPC was
    over before it could be ended: gRPC itself had ended it, because its caller has gone, or because its message is too
    large (which gRPC tells the caller). And second, that what a caller sends as text is none.
    """
    if record.name != "grpc._cython.cygrpc":
        return True
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ == "ExecuteBatchError":
        softer = logging.INFO, "gRPC has ended an RPC: its caller has gone, or its message is too large"
    elif record.msg == "Invalid encoding on %s":
        softer = logging.DEBUG, "the metadata of an RPC are not UTF-8"
    else:
        return True
    record.levelno, record.msg = softer
    record.levelname, record.args, record.exc_info = logging.getLevelName(record.levelno), (), None
    return logging.getLogger().isEnabledFor(record.levelno)


class Throttle(logging.Filter):
    """Limits the rate of warnings and errors from each place in the code. Lines of lower levels all pass, and those of
    `refusals`, which has a rule of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limits: dict[tuple[str, int], RateLimit] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written. If so, it gets `left_out`, how many before it were not, if any."""
        if record.levelno < logging.WARNING or record.name == "attnserve_server.observability.refusals":
            return True
        now, place = monotonic(), (record.pathname, record.lineno)
        if (limit := self._limits.get(place)) is None:  # places are lines of code, and few
            limit = self._limits[place] = RateLimit(LINES_PER_SECOND, BURST, now)
        if not limit.take(now):
            return False
        if limit.left_out:
            record.left_out, limit.left_out = limit.left_out, 0
        return True


class _Formatter(logging.Formatter):
    def _time(self, record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        return {key: shown(value) for key, value in vars(record).items() if key not in _STANDARD}

    def _message(self, record: logging.LogRecord) -> str:
        args = record.args
        if isinstance(args, Mapping):
            return str(record.msg) % {key: shown(value) for key, value in args.items()}
        return str(record.msg) % tuple(map(shown, args)) if args else str(record.msg)

    def _traceback(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class TextFormatter(_Formatter):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of the traceback where there is one."""
        words = [self._time(record), record.levelname.lower(), record.name, self._message(record)]
        words += [f"{key}={value}" for key, value in self._fields(record).items()]
        line = _printable(" ".join(words), lambda character: character.encode("unicode_escape").decode("ascii"))
        return "\n".join(filter(None, (line, self._traceback(record))))


class JsonFormatter(_Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        content = self._fields(record) | {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
        }
        if traceback := self._traceback(record):
            content["traceback"] = traceback
        line = json.dumps(content, ensure_ascii=False)
        return _printable(line, lambda character: json.dumps(character).strip('"'))
