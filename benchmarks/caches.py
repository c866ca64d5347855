"""The caches of a workload, one for each sequence: made on a service before it is measured, and opened by each client
that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from attnserve import AsyncCache, AsyncClient, Cache, Client

NO_NAME: Final = "-" * 24
"""A placeholder as long as the name of a cache, for requests that no service gets."""


class SequenceCaches:
    """None before `prepare`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._opened: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def prepare(self, address: str, count: int, tokens: int, make: Callable[[Client, int], Cache]) -> None:
        """Has `make` create the caches of `count` sequences, of `tokens` each, if the service does not have them yet;
        otherwise cuts off what has been appended to them.
        """
        with Client(address) as client:
            if not self._names or self._names[0] not in {cache.name for cache in client.caches.list()}:
                self._names = [make(client, sequence).name for sequence in range(count)]
            for name in self._names:
                client.open_cache(name).truncate(tokens)

    def names(self, count: int) -> list[str]:
        """The names of the first `count`, or placeholders."""
        return self._names[:count] or [NO_NAME] * count

    def of(self, client: Client) -> list[Cache]:
        """All of them, opened by a client."""
        if client not in self._opened:
            self._opened[client] = [client.open_cache(name) for name in self._names]
        caches: list[Cache] = self._opened[client]
        return caches

    async def of_async(self, client: AsyncClient) -> list[AsyncCache]:
        """The same for asyncio."""
        if client not in self._opened:
            self._opened[client] = [await client.open_cache(name) for name in self._names]
        caches: list[AsyncCache] = self._opened[client]
        return caches
