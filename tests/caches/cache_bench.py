"""An engine with caches, and its callers, for tests that control what is in flight at any moment.

The device is real; a test can block it (with events, never with time) and make it fail.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from time import monotonic, perf_counter

import accuracy
import numpy as np
import pytest
import torch
from caller import Reference, attend_request, result, tokens
from cases import Case
from engines import OpenAdmission, batch_queue, engine_of
from limits import LIMITS
from rpcs import new_metrics
from stores import store_of

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import caches_pb2
from attnserve_server.access.callers import anybody
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.operations import Fork, Look, Truncate, read_append
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.request import read_attend
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.store import Truncation
from attnserve_server.caches.work import CacheHost, Use
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import RequestError
from attnserve_server.kernels import AttentionCall, AttentionResult
from attnserve_server.requests.work import Work
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.entry import Entry, Outcome

PAGE_BYTES, PAGES = 1024, 64
"""A page holds 8 tokens of 2 heads, 8 wide, float32."""
PATIENCE_S = 60.0
SHAPE = CacheShape(2, 8, 8, 1, "float32")
QUERY = np.random.default_rng(0).standard_normal((2, 1, 8)).astype(np.float32)


class HeldDevice(CpuDevice):
    """A CPU that computes no attention while it is held, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(1, -1, None)
        self.entered = threading.Semaphore(0)
        self.may_run = threading.Event()
        self.may_run.set()
        self.failures = 0

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        self.entered.release()
        assert self.may_run.wait(PATIENCE_S)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a message of the device's own")
        return super().attend(calls, flops)

    async def until_entered(self) -> None:
        """Waits until a batch is being computed; call it once for each."""
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: self.entered.acquire(timeout=PATIENCE_S))


class Bench:
    """An engine with caches, and the callers' side of it."""

    def __init__(self) -> None:
        self.device = HeldDevice()
        pool_bytes = PAGES * PAGE_BYTES
        self.store = store_of(PAGES, page_bytes=PAGE_BYTES)
        self.host = CacheHost(self.store, PagePool.of(self.device, pool_bytes, PAGE_BYTES), "")
        self.admission = OpenAdmission(1000, 10**12, 10**15)
        self.queue: BatchQueue[Entry] = batch_queue()
        self.metrics = new_metrics()
        self.engine = engine_of(self.device, self.queue, self.admission, self.metrics)
        self.engine.open()
        self.order: list[Entry] = []
        self._futures: dict[Entry, asyncio.Future[Outcome | RequestError]] = {}

    def create(self, count: int = 0, ttl: float | None = None) -> Cache:
        """A cache with `count` tokens, which are those of `tokens(0, count)`."""
        cache = self.store.create(SHAPE, ttl, monotonic())
        reservation = self.store.reserve([(cache, 0, count)], 0.0)
        key, value = map(torch.from_numpy, tokens(0, count))
        self.host.pages.write(SHAPE, self.store.place(reservation, 0.0)[0], key, value)
        self.store.cancel(reservation)
        return cache

    def submit(self, request: Work, deadline: float = math.inf, caller: str | None = None) -> Entry:
        """Hands a request to the engine. Raises RequestError."""
        entry = Entry(request, self._reply, perf_counter(), deadline, 1e-6, caller, None)
        self._futures[entry] = asyncio.get_running_loop().create_future()
        self.engine.submit(entry)
        return entry

    def attend(
        self, *caches: Cache, seed: int = 0, appended: int = 0, expected_length: int | None = None, scores: bool = False
    ) -> Entry:
        """Attends to caches with `QUERY`, having appended `tokens(seed, appended)` to each."""
        batch = len(caches)
        query = np.stack([QUERY] * batch)
        pair = None
        if appended:
            key, value = tokens(seed, appended)
            pair = np.stack([key] * batch), np.stack([value] * batch)
        references = [Reference(cache.name, 0, expected_length) for cache in caches]
        message = attend_request(
            Case(query, query, query), references, pair, return_scores="weights" if scores else None
        )
        data = message.SerializeToString()
        return self.submit(read_attend(self.host, anybody("here"), data, 0, len(data), LIMITS))

    def append(self, cache: Cache, seed: int, count: int, expected_length: int | None = None) -> Entry:
        """Appends `tokens(seed, count)`."""
        wire = attend_request(Case(QUERY, *tokens(seed, count)))
        message = caches_pb2.CacheServiceAppendRequest(
            name=cache.name, key=wire.key, value=wire.value, expected_length=expected_length
        )
        return self.submit(read_append(self.host, None, message.SerializeToString(), LIMITS))

    def truncate(self, cache: Cache, length: int) -> Entry:
        """Truncates a cache to `length` tokens."""
        return self.submit(Truncate(self.host, (Use(cache, 0, 0, None),), 0, [Truncation(cache, length, 0)]))

    def fork(self, cache: Cache) -> Entry:
        """Forks a cache."""
        return self.submit(Fork(self.host, (Use(cache, 0, 0, None),), 0, [cache], None, b""))

    async def forked(self, entry: Entry) -> Cache:
        """The cache that `fork` made."""
        outcome = await self.outcome(entry)
        assert isinstance(outcome, Outcome), outcome
        pieces, _ = entry.request.encode(outcome.result, outcome.phases, outcome.batch_size)
        name = caches_pb2.CacheServiceForkResponse.FromString(b"".join(pieces)).caches[0].name
        return self.store.get(name, monotonic(), None)

    def look(self, cache: Cache, deadline: float = math.inf, caller: str | None = None) -> Entry:
        """Asks for the state of a cache."""
        return self.submit(Look(self.host, (Use(cache, 0, 0, None),), 0, None, _seen), deadline, caller)

    async def seen(self, entry: Entry) -> int:
        """The number of tokens that `look` saw."""
        outcome = await self.outcome(entry)
        assert isinstance(outcome, Outcome), outcome
        pieces, _ = entry.request.encode(outcome.result, outcome.phases, outcome.batch_size)
        return int(caches_pb2.CacheServiceGetResponse.FromString(b"".join(pieces)).cache.lengths[0])

    async def cut(self, entry: Entry) -> int:
        """The number of tokens that the reply to `truncate` says."""
        outcome = await self.outcome(entry)
        assert isinstance(outcome, Outcome), outcome
        pieces, _ = entry.request.encode(outcome.result, outcome.phases, outcome.batch_size)
        return int(caches_pb2.CacheServiceTruncateResponse.FromString(b"".join(pieces)).caches[0].lengths[0])

    def _reply(self, entry: Entry, outcome: Outcome | RequestError) -> None:
        self.order.append(entry)
        self.engine.release(entry)
        self._futures[entry].set_result(outcome)

    async def outcome(self, entry: Entry) -> Outcome | RequestError:
        """Its outcome."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._futures[entry]

    async def output(self, entry: Entry) -> pb.AttendResponse:
        """The reply to an entry, which must have succeeded."""
        outcome = await self.outcome(entry)
        assert isinstance(outcome, Outcome), outcome
        pieces, _ = entry.request.encode(outcome.result, outcome.phases, outcome.batch_size)
        return pb.AttendResponse.FromString(b"".join(pieces))

    async def check(self, entry: Entry, *parts: tuple[int, int]) -> None:
        """Asserts that the reply is that of these `tokens(seed, count)` in a row, for the only cache of a request."""
        reply = await self.output(entry)
        key, value = (np.concatenate(each, axis=1) for each in zip(*itertools.starmap(tokens, parts), strict=True))
        assert list(reply.cache_lengths) == [key.shape[1]]
        case = Case(QUERY[None], key[None], value[None])
        accuracy.check(case, result(reply))

    async def finished(self) -> None:
        """Asserts that everything has been answered, and nothing is left of it but in caches."""
        assert await self.engine.drain(PATIENCE_S)
        assert (self.admission.requests, self.admission.bytes, self.admission.flops) == (0, 0, 0)
        assert self.engine.waiting_for_turns == 0
        assert self.store.reserved_pages == 0
        assert set(Counter(self.order).values()) == {1}
        await asyncio.sleep(0)  # the last batch's time is learnt once its replies are on their way
        assert self.queue._fairness._running == 0
        assert all(cache.users == 0 for cache in self.store.list(None, 0.0))


def _seen(described: Sequence[caches_pb2.Cache]) -> caches_pb2.CacheServiceGetResponse:
    return caches_pb2.CacheServiceGetResponse(cache=described[0])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    before = torch.get_num_threads()
    bench = Bench()
    yield bench
    bench.device.may_run.set()
    assert await bench.engine.drain(PATIENCE_S)
    bench.engine.close()
    bench.device.close()
    torch.set_num_threads(before)
