"""How a call ends: with the result made of its reply, or with an error; if it could not be made, with neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from attnserve._errors import AttnServeError

R = TypeVar("R")


def outcome_of(finish: Callable[[R], Any], reply: R | Exception) -> tuple[Any, Exception | None]:
    """The result that `finish` makes of a reply, and None. Or None, and the error: that which came in place of a reply,
    or that which `finish` raised.
    """
    if isinstance(reply, Exception):
        return None, _without_frames(reply)
    try:
        return finish(reply), None
    except Exception as error:  # any error (also: out of device memory) is for the caller to see
        return None, _without_frames(error)


def _without_frames(error: Exception) -> Exception:
    """Takes the traceback off an error of ours, which breaks a cycle: its frames hold the future, which holds it."""
    return error.with_traceback(None) if isinstance(error, AttnServeError) else error


class Forsaken(Protocol):
    """A future that nobody may get."""

    def forsake(self, error: BaseException) -> object:
        """Has it hold nothing any more, because its call could not be made."""


class Beginning:
    """A context manager around the making of a call. If that fails, nobody gets the future: it is forsaken."""

    __slots__ = ("_future",)

    def __init__(self, future: Forsaken) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._future.forsake(error)
