"""The servers of an asyncio client: `Servers`, whose first look-up of a name does not block the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from attnserve._servers.replicas import Connection
from attnserve._servers.servers import Servers, of_caller

C = TypeVar("C", bound=Connection)


class TaskServers(Servers[C]):
    """Where the calls of a client go. Its coroutines first look up a name that has not been looked up."""

    async def resolve_soon(self, timeout: float | None) -> float | None:
        """As `resolve`, without blocking the loop."""
        if not self.is_unresolved:
            return self.resolve(timeout)
        begin = time.monotonic()
        looked_up = asyncio.wrap_future(self.resolving())
        looked_up.add_done_callback(_retrieve)
        await asyncio.wait((looked_up,), timeout=timeout)  # cancels nothing: others wait for the same look-up
        failure = looked_up.exception() if looked_up.done() else self.too_late()
        if failure is not None:
            raise of_caller(failure) from failure.__cause__
        self.update(looked_up.result())
        return self.resolve(None if timeout is None else max(0.0, timeout - (time.monotonic() - begin)))

    async def homes_soon(self, timeout: float | None) -> Sequence[str | None]:
        """As `homes`, without blocking the loop."""
        return self.homes(await self.resolve_soon(timeout))


def _retrieve(looked_up: asyncio.Future[Any]) -> None:
    """Keeps asyncio from reporting the failure of a look-up for which nobody waits any more."""
    if not looked_up.cancelled():
        looked_up.exception()
