"""Unary calls whose replies wait to be sent, and that nothing else counts: how many there may be.

In: calls, when their replies are ready. Out: whether there is room for more. A caller decides when it takes a reply,
and whether; until then the call takes some 23 KiB.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import Any, Final

from attnserve_server.errors import Overloaded
from attnserve_server.host.connections import disconnect
from attnserve_server.no_room import too_many_unread

OF_CONNECTION: Final = 1024
"""The most on one connection. A proxy may have one for all its clients."""
OF_ALL: Final = 16_384
"""The most on all connections: they take 370 MiB."""
ENDED_AT_ONCE: Final = 16
"""When there are too many in all, one in this many of them is ended, the oldest first, by closing its connection."""


class RepliesDue:
    """Calls whose replies gRPC has not sent: at most `most_of_one` on one connection, and `most_of_all` in all. When
    there are too many in all, those on a connection that has room are not refused. Instead, the connections of the
    oldest are closed: who keeps replies waiting longest does not read.
    """

    def __init__(self, most_of_one: int = OF_CONNECTION, most_of_all: int = OF_ALL) -> None:
        self._most_of_one = most_of_one
        self._most_of_all = most_of_all
        self._calls: dict[asyncio.Task[Any], str] = {}
        """The tasks of calls, and their connections, as gRPC names the other end: the oldest first."""
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._calls)

    def require_room(self, peer: str) -> None:
        """Raises Overloaded if as many replies as may be wait on this connection. If as many as may be wait in all, the
        oldest connections are closed; Overloaded is raised if there are none to close, since on a unix socket they
        cannot be told apart.
        """
        if self._of[peer] >= self._most_of_one and not peer.startswith("unix"):
            raise Overloaded(too_many_unread(self._most_of_one))
        if len(self._calls) >= self._most_of_all:
            self._end_oldest()
            if len(self._calls) >= self._most_of_all:
                raise Overloaded(too_many_unread(self._most_of_all, of_all=True))

    def begin(self, peer: str) -> None:
        """The reply to the RPC whose handler calls this is ready; it counts until gRPC has sent it."""
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = peer
        self._of[peer] += 1
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        peer = self._calls.pop(task, None)
        if peer is not None:  # else it has been ended
            self._of[peer] -= 1
            if not self._of[peer]:
                del self._of[peer]

    def _end_oldest(self) -> None:
        oldest = max(1, self._most_of_all // ENDED_AT_ONCE)
        peers = {peer for peer in islice(self._calls.values(), oldest) if not peer.startswith("unix")}
        if not disconnect(*peers):
            return
        for task in [task for task, peer in self._calls.items() if peer in peers]:
            self._end(task)
            task.cancel()  # else gRPC would log the end of the connection as its error
