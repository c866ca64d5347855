"""What a call comes to: the result that is made of its reply, the error in its place, or nothing if it is not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from attnserve._errors import AttnServeError

R = TypeVar("R")


def outcome_of(finish: Callable[[R], Any], reply: R | Exception) -> tuple[Any, Exception | None]:
    """What `finish` makes of a reply, and no error; or nothing, and the error that came instead or that it raised."""
    if isinstance(reply, Exception):
        return None, _without_frames(reply)
    try:
        return finish(reply), None
    except Exception as error:  # any error (also: out of device memory) is for the caller to see
        return None, _without_frames(error)


def _without_frames(error: Exception) -> Exception:
    """Breaks a cycle: the frames of an error of ours hold the future."""
    return error.with_traceback(None) if isinstance(error, AttnServeError) else error


class Forsaken(Protocol):
    """A future that nobody may get."""

    def forsake(self, error: BaseException) -> object:
        """Has it hold nothing any more, because its call could not be made."""


class Beginning:
    """While a call is made, as a context manager: if that fails, nobody gets its future."""

    __slots__ = ("_future",)

    def __init__(self, future: Forsaken) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._future.forsake(error)
