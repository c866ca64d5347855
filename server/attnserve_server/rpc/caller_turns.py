"""Calls of which each caller has one at a time, because their replies are long and counted nowhere else.

In: callers. Out: turns, in the order in which they were asked for. No gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Final

from attnserve_server.errors import Overloaded
from attnserve_server.no_room import share_exceeded

MOST_WAITING: Final = 100
"""How many calls of one caller may wait for their turn: their requests are in memory, and in no queue that counts them.
"""
RETRY_DELAY: Final = 1.0
"""If a caller has too many calls waiting for their turn: after how many seconds it is to ask again."""


class CallerTurns:
    """Turns of callers. A caller has at most one turn at a time, and at most `MOST_WAITING` calls that wait for one;
    they get it in the order in which they came.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Of each caller that has a turn: its calls that wait for the next one."""

    async def take(self, caller: Hashable) -> Callable[[], None]:
        """Waits for a turn; returns what ends it, to be called once. Raises Overloaded if too many wait."""
        waiting = self._waiting.get(caller)
        if waiting is None:
            self._waiting[caller] = deque()
        elif len(waiting) >= MOST_WAITING:
            raise Overloaded(share_exceeded("waiting_calls", MOST_WAITING, RETRY_DELAY))
        else:
            waiting.append(turn := asyncio.get_running_loop().create_future())
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it came as the call was cancelled
                    self._end(caller)
                elif turn in waiting:  # else `_end` has passed over it already
                    waiting.remove(turn)
                raise
        return partial(self._end, caller)

    def _end(self, caller: Hashable) -> None:
        waiting = self._waiting[caller]
        while waiting:
            if not (turn := waiting.popleft()).done():  # else it is cancelled
                turn.set_result(None)
                return
        del self._waiting[caller]
