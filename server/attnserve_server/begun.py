"""Coroutines that begin before anybody waits for them.

In: a coroutine. Out: something to await once, which goes on from where the coroutine first had to wait. A task would
begin a turn of the event loop later, and take another turn to say that it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Begun:
    """A coroutine that has run to where it first waits. What it raised on the way there, it raises when awaited."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._waits_for: Any = None
        self._end: BaseException | None = None
        try:
            self._waits_for = coroutine.send(None)
        except BaseException as end:
            self._end = end

    def __await__(self) -> Generator[Any, Any, None]:
        if self._end is None:
            try:
                yield self._waits_for
            except BaseException as error:  # whoever awaits it is cancelled
                self._coroutine.throw(error)
            yield from self._coroutine.__await__()
        elif not isinstance(self._end, StopIteration):
            raise self._end

    def close(self) -> None:
        """Ends it where it is, if nobody is going to await it, nor what it waits for."""
        self._coroutine.close()
        if asyncio.isfuture(self._waits_for):
            self._waits_for.cancel()  # otherwise asyncio would tell of an error there that nobody has met
