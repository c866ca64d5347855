"""The process that a client belongs to: the one in which it is first used.

In: the entry of each call, and forks, which are counted. Out: `ClientClosedError`, if a client that was used before a
fork is used in the child, or if any is used while the interpreter ends.

Why: a forked child has none of the client's threads, and an interpreter that ends has stopped them. A lock that one of
these threads held stays locked for ever. So this check comes before any lock is taken, and itself takes none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from attnserve._errors import ClientClosedError

T = TypeVar("T")

_FORKED: Final = "the client was used before the process was forked; spawn processes, or make a client in each"
_ENDING: Final = "the interpreter is ending, and has stopped the client's threads"

_forks = 0
"""How many forks lead from the first process to this one."""

_inheritances: Final[list[tuple[Callable[[], Iterable[Any]], list[Any]]]] = []
"""For each call of `inherited`: its argument, and the list that it returned."""


class Process:
    """The process that one client belongs to."""

    __slots__ = ("_forks",)

    def __init__(self) -> None:
        self._forks: int | None = None

    def enter(self) -> None:
        """Notes that the client is used. ClientClosedError if it was first used in another process, or if the
        interpreter is ending: finalizers (``__del__``) still run then, and may use the client, but its threads do not.
        """
        if sys.is_finalizing():
            raise ClientClosedError(_ENDING)
        if self._forks != _forks:
            if self._forks is not None:
                raise ClientClosedError(_FORKED)
            self._forks = _forks

    @property
    def is_another(self) -> bool:
        """Whether the client was first used in another process, before a fork that led to this one."""
        return self._forks is not None and self._forks != _forks

    @property
    def lacks_threads(self) -> bool:
        """Whether the client's threads and gRPC's do not exist, or no longer: nothing may wait for them."""
        return self.is_another or sys.is_finalizing()


def inherited(alive: Callable[[], Iterable[T]]) -> Sequence[T]:
    """A list, empty until a fork. In each forked child, it holds the objects that `alive` returns there, so that they
    are never collected: collecting a gRPC object would block on threads that exist only in the parent.
    """
    kept: list[T] = []
    _inheritances.append((alive, kept))
    return kept


def _forked() -> None:
    global _forks
    _forks += 1
    for alive, kept in _inheritances:
        kept.extend(alive())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
