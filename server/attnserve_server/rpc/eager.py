"""Coroutines that begin before anybody waits for them.

In: a coroutine. Out: a call, when it has ended. A task would begin a turn of the event loop later, and who waits for
one is told another turn later; here what the coroutine waits for has it go on, and its end is told, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class EagerCoroutine:
    """A coroutine that has run to where it first waits, for a future or a turn of the loop, and goes on by itself.

    `ended` is called with this when there is nothing left of it to run: before the constructor returns, if it never
    waits.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], ended: Callable[[EagerCoroutine], None]) -> None:
        self._coroutine = coroutine
        self._ended = ended
        self._waits_for: asyncio.Future[Any] | None = None
        self._closed = False
        self.has_ended = False
        self.error: BaseException | None = None
        """What it raised, if it has ended with that."""
        self._go_on()

    def close(self) -> None:
        """Ends it where it is, if it has not ended, and what it waits for. Nobody is told."""
        self._closed = True
        self._coroutine.close()
        if self._waits_for is not None:
            self._waits_for.cancel()  # otherwise asyncio would tell of an error there that nobody has met

    def _go_on(self, _: asyncio.Future[Any] | None = None) -> None:
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
            waits_for._asyncio_future_blocking = False  # a task says so too: it has seen what it is to wait for
            waits_for.add_done_callback(self._go_on)
            self._waits_for = waits_for

    def _end(self, error: BaseException | None) -> None:
        self.has_ended, self.error = True, error
        self._ended(self)
