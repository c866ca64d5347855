"""What a call comes to: the result that is made from its reply, or the error in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
