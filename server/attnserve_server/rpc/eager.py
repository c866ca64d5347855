"""Coroutines that begin before anybody waits for them.

In: a coroutine. Out: a call, when it has ended. A task would begin one turn of the event loop later, and whoever awaits
it would resume another turn later; here the coroutine goes on, and its end is reported, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class EagerCoroutine:
    """A coroutine that has run up to its first wait, for a future or a turn of the loop, and goes on by itself.

    `ended` is called with this object when the coroutine has ended: before the constructor returns, if it never waits.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], ended: Callable[[EagerCoroutine], None]) -> None:
        self._coroutine = coroutine
        self._ended = ended
        self._waits_for: asyncio.Future[Any] | None = None
        self._closed = False
        self.has_ended = False
        self.error: BaseException | None = None
        """What it raised, if that ended it."""
        self._go_on()

    def close(self) -> None:
        """Ends it where it is, if it has not ended, and cancels what it waits for. `ended` is not called."""
        self._closed = True
        self._coroutine.close()
        if self._waits_for is not None:
            self._waits_for.cancel()  # else asyncio would report its error as never retrieved

    def _go_on(self, _: asyncio.Future[Any] | None = None) -> None:
        """Runs the coroutine up to its next wait, after which this is called again."""
        if self._closed:
            return
        self._waits_for = None
        try:
            waits_for = self._coroutine.send(None)
        except StopIteration:
            self._end(None)
        except BaseException as error:
            self._end(error)
        else:
            if waits_for is None:
                asyncio.get_running_loop().call_soon(self._go_on)
                return
            waits_for._asyncio_future_blocking = False  # as a task does: it acknowledges the future
            waits_for.add_done_callback(self._go_on)
            self._waits_for = waits_for

    def _end(self, error: BaseException | None) -> None:
        self.has_ended, self.error = True, error
        self._ended(self)
