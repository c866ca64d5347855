"""Several caches in one request, which forks or truncates all of them or none: how many a server takes, and its errors
in the words of the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

from attnserve._caching.state import CacheState
from attnserve._errors import FailedPreconditionError, InvalidRequestError

AT_ONCE: Final = 256
"""The most caches that a server forks or truncates in one request."""
LAYERS_AT_ONCE: Final = 16384
"""The most layers that these have together, if they are several."""

_NAMED_BY_SERVER: Final = re.compile(r"^(?:truncations|names)(?:\[(\d+)\])?(\.length)?(?:\.name)?")

T = TypeVar("T")

Words: TypeAlias = Callable[[int, bool], str]
"""What the caller calls one of the caches, of this index in the request, or with True its length."""


def cache_at(index: int, is_length: bool) -> str:
    """The words for caches that are in the order in which the caller gave them."""
    return f"lengths[{index}]" if is_length else f"caches[{index}]"


def portions(items: Sequence[T], layers: int) -> Iterator[Sequence[T]]:
    """Items that each stand for a cache of so many layers, as many at a time as a server takes in one request."""
    return of_at_most(max(1, min(AT_ONCE, LAYERS_AT_ONCE // layers)), items)


def of_at_most(count: int, items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Items in portions of so many, the last of which may be smaller."""
    return (items[first : first + count] for first in range(0, len(items), count))


def at_once(states: Sequence[CacheState]) -> Sequence[CacheState]:
    """The same, if a server takes so many in one request; else InvalidRequestError."""
    if len(states) > AT_ONCE:
        raise InvalidRequestError(f"caches: expected at most {AT_ONCE}, found {len(states)}", field="caches")
    return states


def in_words_of_caller(
    error: FailedPreconditionError | InvalidRequestError, words: Words
) -> FailedPreconditionError | InvalidRequestError:
    """A server's error about a group of caches, with what the caller calls these and their lengths."""

    def word(found: re.Match[str]) -> str:
        index, length = found.groups()
        return "caches" if index is None else words(int(index), bool(length))

    renamed: FailedPreconditionError | InvalidRequestError
    message = _NAMED_BY_SERVER.sub(word, str(error))
    if isinstance(error, InvalidRequestError):
        field = None if error.field is None else _NAMED_BY_SERVER.sub(word, error.field)
        renamed = InvalidRequestError(message, field=field, limit=error.limit, code=error.code, details=error.details)
    else:
        renamed = FailedPreconditionError(message, code=error.code, details=error.details)
    renamed.resent = error.resent
    return renamed
