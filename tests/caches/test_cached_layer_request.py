"""Requests to decoders with caches in an engine: their cost, and what is left of those that are refused or fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from math import inf
from time import monotonic, perf_counter

import numpy as np
import pytest
import torch
from checkpoints import HEADS, VOCABULARY, WIDTH
from conftest import Models
from engines import OpenAdmission, batch_queue, engine_of
from layer_requests import registry_of
from limits import LIMITS
from rpcs import new_metrics
from stores import store_of

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.access.callers import anybody
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.work import CacheHost
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import InvalidRequest, OutOfMemory, RequestError
from attnserve_server.kernels import AttentionCall, AttentionResult
from attnserve_server.layers.cached_request import CachedLayerRequest, read_apply
from attnserve_server.layers.registry import Registry
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.problem import PAIR_COST
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry, Outcome

PATIENCE_S = 60.0
PAGES, PAGE_BYTES = 24, 4096
BLOCKS = 2
SHAPE = CacheShape(
    num_kv_heads=HEADS, head_dim=WIDTH // HEADS, value_dim=WIDTH // HEADS, layers=BLOCKS, dtype="float32"
)
GUILTY = 7
"""Requests with this many inputs fail, when they are told to."""


class FailingDevice(CpuDevice):
    """A CPU that fails at every second attention of GUILTY queries, so once the first block has been computed."""

    fails = False
    attentions = 0

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        if self.fails and any(call.query.shape[2] == GUILTY for call in calls):
            self.attentions += 1
            if self.attentions % BLOCKS == 0:
                raise MemoryError
        return super().attend(calls, flops)


@dataclass
class Bench:
    """An engine, and callers of its GPT-2."""

    device: FailingDevice
    registry: Registry
    engine: Engine
    host: CacheHost

    def create(self) -> Cache:
        return self.host.store.create(SHAPE, None, monotonic())

    def read(self, *caches: Cache, tokens: int, limits: RequestLimits = LIMITS) -> CachedLayerRequest:
        shape = (len(caches), tokens)
        ids = tensor_pb2.Tensor(
            dtype="DATA_TYPE_INT64", shape=shape, data=(np.arange(len(caches) * tokens) % VOCABULARY).tobytes()
        )
        references = [pb.CacheReference(name=cache.name) for cache in caches]
        message = pb.ApplyRequest(layer="gpt2", input=ids, caches=references).SerializeToString()
        request = read_apply(self.host, self.registry, anybody("here"), message, 0, len(message), limits)
        assert isinstance(request, CachedLayerRequest)
        return request

    def submit(self, *caches: Cache, tokens: int) -> asyncio.Future[Outcome | RequestError]:
        future: asyncio.Future[Outcome | RequestError] = asyncio.get_running_loop().create_future()

        def reply(entry: Entry, outcome: Outcome | RequestError) -> None:
            self.engine.release(entry)
            future.set_result(outcome)

        self.engine.submit(Entry(self.read(*caches, tokens=tokens), reply, perf_counter(), inf, 0.0, None, None))
        return future

    async def output(self, *caches: Cache, tokens: int) -> bytes:
        outcome = await asyncio.wait_for(self.submit(*caches, tokens=tokens), PATIENCE_S)
        assert isinstance(outcome, Outcome), outcome
        return bytes(outcome.result.output)


@pytest.fixture
async def bench(models: Models) -> AsyncIterator[Bench]:
    threads = torch.get_num_threads()
    device, metrics = FailingDevice(1, 10**15, None), new_metrics()
    queue: BatchQueue[Entry] = batch_queue()
    engine = engine_of(device, queue, OpenAdmission(100, 10**9, 10**12), metrics)
    engine.open()
    registry = registry_of(device, models.directory)
    await registry.load("layers.toml", ["gpt2"])
    host = CacheHost(
        store_of(PAGES, page_bytes=PAGE_BYTES),
        PagePool.of(device, PAGES * PAGE_BYTES, PAGE_BYTES),
        address="",
    )
    yield Bench(device, registry, engine, host)
    assert await engine.drain(PATIENCE_S)
    assert host.store.reserved_pages == 0
    engine.close()
    device.close()
    torch.set_num_threads(threads)


async def test_a_failed_computation_takes_its_appends_back(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """In all layers of all its caches; other requests of the same batch keep theirs."""
    store = bench.host.store
    guilty, other, innocent = (bench.create() for _ in range(3))
    for cache in (guilty, other, innocent):
        await bench.output(cache, tokens=9)
    # Last pages are shared, so appends go into copies of them.
    forks = [store.fork_one(cache, None, monotonic(), b"", None) for cache in (guilty, other)]
    before = {cache: [cache.pages(layer) for layer in range(BLOCKS)] for cache in (guilty, other, *forks)}
    step = await bench.output(store.fork_one(innocent, None, monotonic(), b"", None), tokens=3)
    used = store.used_bytes
    bench.device.fails = True
    failing, running = bench.submit(guilty, other, tokens=GUILTY), bench.submit(innocent, tokens=3)
    outcomes = await asyncio.wait_for(asyncio.gather(failing, running), PATIENCE_S)
    bench.device.fails = False
    assert bench.device.attentions == 2 * BLOCKS, "in the batch, and again alone"
    assert "MemoryError" in caplog.text
    assert isinstance(outcomes[0], OutOfMemory)
    assert isinstance(outcomes[1], Outcome)
    assert bytes(outcomes[1].result.output) == step
    assert innocent.lengths == [12, 12]
    assert store.used_bytes == used, "the innocent's last pages are its own since its fork has copies"
    assert {cache: [cache.pages(layer) for layer in range(BLOCKS)] for cache in before} == before
    assert all(cache.lengths == [9, 9] for cache in before)
    # As if it had never been tried.
    assert await bench.output(guilty, other, tokens=GUILTY) == await bench.output(*forks, tokens=GUILTY)
    assert guilty.lengths == other.lengths == [16, 16]


async def test_resident_keys_cost(bench: Bench) -> None:
    """All tokens that each input attends to count, not only the appended ones."""
    cache = bench.create()
    empty = bench.read(cache, tokens=3)
    appending = bench.submit(cache, tokens=10)
    waiting = bench.read(cache, tokens=3)
    assert isinstance(await asyncio.wait_for(appending, PATIENCE_S), Outcome)
    request = bench.read(cache, tokens=3)
    assert waiting.extent.cost == request.extent.cost, "what has been admitted before it is counted in already"
    assert request.extent.flops - empty.extent.flops == BLOCKS * 3 * 10 * HEADS * 2 * (2 * WIDTH // HEADS)
    assert request.extent.cost - empty.extent.cost == BLOCKS * 3 * 10 * HEADS * PAIR_COST, (
        "which is more, as its heads are narrow"
    )
    assert request.extent.query_tokens == 3
    assert request.needs == [cache.name]


async def test_resident_keys_count_towards_the_most_that_a_request_may_cost(bench: Bench) -> None:
    """On arrival, with what is queued before it, and in its turn, with what has been appended meanwhile."""
    cache = bench.create()
    await bench.output(cache, tokens=10)
    weighed = bench.read(cache, tokens=3)
    applied, cost = weighed.applied.extent, weighed.extent.cost
    most = applied.weighed + cost - applied.cost
    assert bench.read(cache, tokens=3, limits=replace(LIMITS, max_request_flops=most)).extent.cost == cost
    with pytest.raises(InvalidRequest, match=rf"at most {most - 1} FLOPs \(max_request_flops\)"):
        bench.read(cache, tokens=3, limits=replace(LIMITS, max_request_flops=most - 1))
    request = bench.read(cache, tokens=3, limits=replace(LIMITS, max_request_flops=most))
    request.count_over([10])
    with pytest.raises(InvalidRequest, match="max_request_flops"):
        request.count_over([11])
    assert request.extent.cost == weighed.extent.cost


async def test_no_room_is_foreseen(bench: Bench) -> None:
    """For all layers together, on arrival of the request: nothing is appended, nothing stays reserved."""
    caches = [bench.create() for _ in range(6)]
    await bench.output(caches[0], tokens=25)  # two pages a layer
    with pytest.raises(CacheFull) as caught:
        bench.submit(*caches[1:], bench.create(), tokens=25)
    assert caught.value.metadata == {"bound": "cache_bytes", "free_bytes": str((PAGES - 2 * BLOCKS) * PAGE_BYTES)}
    assert bench.host.store.reserved_pages == 0
    assert await bench.output(*caches[1:], tokens=25)
    assert [cache.lengths for cache in caches] == [[25, 25]] * 6


async def test_requests_wait_for_their_caches(bench: Bench) -> None:
    """Two that share a cache take turns, whatever their other caches are; one that shares none goes with the first."""
    first, shared, last = (bench.create() for _ in range(3))
    futures = [
        bench.submit(first, shared, tokens=2),
        bench.submit(shared, last, tokens=3),
        bench.submit(bench.create(), tokens=1),
    ]
    outcomes = await asyncio.wait_for(asyncio.gather(*futures), PATIENCE_S)
    assert [outcome.batch_size for outcome in outcomes if isinstance(outcome, Outcome)] == [2, 1, 2]
    assert [cache.lengths for cache in (first, shared, last)] == [[2, 2], [5, 5], [3, 3]]
