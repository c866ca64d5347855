"""Lists and deletions of many caches: others get their turns in between. And what a list says is free.

`CacheService` is served in this process, so that its patience can be set and the order of what it does recorded.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from calls import PATIENCE_S
from grpc import aio
from limits import LIMITS
from rpcs import new_metrics, rpcs_of
from stores import SHAPE, append, store_of

from attnserve.v1 import caches_pb2 as pb
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.store import CacheStore
from attnserve_server.caches.work import CacheHost
from attnserve_server.rpc import cache_service, reading_turns
from attnserve_server.rpc.cache_service import CACHE_SERVICE_NAME, CacheService
from attnserve_server.rpc.reading_turns import ReadingTurns

CACHES = 50


class Served:
    """A service with CACHES caches, each with a token, and a record of what is done to which and of others' turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: float) -> None:
        monkeypatch.setattr(reading_turns, "SLICE_SECONDS", patience)
        monkeypatch.setattr(reading_turns, "TURNS", 0)
        monkeypatch.setattr(cache_service, "describe", self._recorded(cache_service.describe))
        monkeypatch.setattr(CacheStore, "delete", self._recorded(CacheStore.delete))
        self.events: list[str] = []
        self.store = store_of(CACHES)
        for _ in range(CACHES):
            append(self.store, self.store.create(SHAPE, None, 0.0), 1)
        self._server = aio.server()
        calls: Any = SimpleNamespace(handler=lambda operation, read, **_: None)  # for what is not asked here
        host = CacheHost(self.store, pages=None, address="")  # type: ignore[arg-type]
        rpcs = rpcs_of(new_metrics())
        CacheService(host, calls, rpcs, 0.0, LIMITS, ReadingTurns()).register(self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    def _recorded(self, do: Any) -> Any:
        def recorded(*arguments: Any) -> Any:
            self.events.append("cache")
            return do(*arguments)

        return recorded

    def deleting(self, cache: Cache, describe: Any) -> Any:
        """`describe`, which now deletes a cache first."""

        def describing(*arguments: Any) -> Any:
            self.store.delete(cache)
            return describe(*arguments)

        return describing

    async def ask(self, method: str, request: Any, response_type: Any) -> Any:
        """The answer to a request. Meanwhile, somebody else has something to do in every turn of the loop."""
        async with aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            ask: Any = channel.unary_unary(
                f"/{CACHE_SERVICE_NAME}/{method}", lambda message: message.SerializeToString(), response_type.FromString
            )
            other = asyncio.create_task(self._other())
            try:
                return await ask(request, timeout=PATIENCE_S)
            finally:
                other.cancel()

    async def _other(self) -> None:
        while True:
            self.events.append("other")
            await asyncio.sleep(0)

    async def __aenter__(self) -> Served:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def runs(self) -> list[int]:
        """How many caches were dealt with in each turn in which any was."""
        turns = "".join("c" if event == "cache" else " " for event in self.events).split()
        return [len(turn) for turn in turns]


@pytest.mark.parametrize(("patience", "runs"), [(1e-9, [1] * CACHES), (PATIENCE_S, [CACHES])])
async def test_others_have_their_turns_while_caches_are_listed(
    monkeypatch: pytest.MonkeyPatch, patience: float, runs: list[int]
) -> None:
    async with Served(monkeypatch, patience) as served:
        reply = await served.ask("List", pb.CacheServiceListRequest(), pb.CacheServiceListResponse)
        assert served.runs() == runs
        assert [list(cache.lengths) for cache in reply.caches] == [[1]] * CACHES


@pytest.mark.parametrize(("patience", "runs"), [(1e-9, [1] * CACHES), (PATIENCE_S, [CACHES])])
async def test_others_have_their_turns_while_caches_are_deleted(
    monkeypatch: pytest.MonkeyPatch, patience: float, runs: list[int]
) -> None:
    async with Served(monkeypatch, patience) as served:
        request = pb.CacheServiceDeleteRequest(names=[cache.name for cache in served.store.list(None, 0.0)])
        await served.ask("Delete", request, pb.CacheServiceDeleteResponse)
        assert served.runs() == runs
        assert served.store.free_pages == CACHES


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("get", pb.CacheServiceDeleteRequest(names=["unknown"] * CACHES)),
        ("give_up", pb.CacheServiceDeleteRequest(request_ids=[b"unknown"] * CACHES)),
    ],
)
async def test_others_have_their_turns_while_what_is_not_there_is_deleted(
    monkeypatch: pytest.MonkeyPatch, method: str, request_: pb.CacheServiceDeleteRequest
) -> None:
    async with Served(monkeypatch, 1e-9) as served:
        monkeypatch.setattr(CacheStore, method, served._recorded(getattr(CacheStore, method)))
        await served.ask("Delete", request_, pb.CacheServiceDeleteResponse)
        assert served.runs() == [1] * CACHES


async def test_a_page_ends_at_about_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches may have any number of layers."""
    monkeypatch.setattr(cache_service, "MAX_PAGE_BYTES", 100)
    async with Served(monkeypatch, PATIENCE_S) as served:
        pages, token = [], ""
        while not pages or token:
            request = pb.CacheServiceListRequest(page_token=token)
            reply = await served.ask("List", request, pb.CacheServiceListResponse)
            pages.append([cache.name for cache in reply.caches])
            token = reply.next_page_token
        assert [name for page in pages for name in page] == [cache.name for cache in served.store.list(None, 0.0)]
        assert {len(page) for page in pages[:-1]} == {3}, "each of some 40 bytes"


async def test_a_cache_that_goes_while_others_are_listed_is_not_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Served(monkeypatch, 1e-9) as served:
        *_, last = served.store.list(None, 0.0)
        monkeypatch.setattr(cache_service, "describe", served.deleting(last, cache_service.describe))
        reply = await served.ask("List", pb.CacheServiceListRequest(), pb.CacheServiceListResponse)
        assert len(reply.caches) == CACHES - 1
        assert last.name not in [cache.name for cache in reply.caches]


async def test_what_is_promised_to_others_is_not_listed_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list says as much as a refusal does."""
    async with Served(monkeypatch, PATIENCE_S) as served:
        store = served.store
        first, second, *rest = store.list(None, 0.0)
        for cache in rest[:3]:
            store.delete(cache)
        waiting = store.reserve([(first, 0, 8)], 0.0)
        with pytest.raises(CacheFull) as refused:
            store.reserve([(second, 0, 8)], 0.0)
        reply = await served.ask("List", pb.CacheServiceListRequest(), pb.CacheServiceListResponse)
        assert reply.free_bytes == store.page_bytes
        assert refused.value.metadata["free_bytes"] == str(reply.free_bytes)
        store.cancel(waiting)
        reply = await served.ask("List", pb.CacheServiceListRequest(), pb.CacheServiceListResponse)
        assert reply.free_bytes == 3 * store.page_bytes
