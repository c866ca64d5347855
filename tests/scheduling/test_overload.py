"""Overload in simulated time: which requests are admitted, whose turn it is, and what that means for those who wait.

The admission, the queue and the rate are the server's own; the device is a formula and the clock a number, so that an
hour takes a second and every run is the same. `benchmarks/chaos/overload.py` does the same to a real server.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import pytest
from engines import OpenAdmission
from waiting import Entry

from attnserve_server.errors import Overloaded
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.opening import CUDA_LAYER_DISCOUNT

MAX_BATCH_FLOPS, MAX_BATCH_REQUESTS = 4 * 10**9, 64
MAX_QUEUE_TIME, AGING = 1.0, 0.1


@dataclass(frozen=True)
class Device:
    """The seconds that a batch takes: a constant, plus so much for each request and each FLOP."""

    batch: float
    request: float
    flop: float

    def seconds(self, requests: int, flops: int) -> float:
        return self.batch + requests * self.request + flops * self.flop


SMALL_CPU = Device(2e-4, 2e-4, 1e-11)
ACCELERATOR = Device(3e-4, 5e-5, 2e-15)

DECODER = Device(4e-3, 2e-5, 0.0)
"""A GPU that steps callers of a decoder: it reads all weights for a batch, whoever is in it."""
STEPS = (14 * 10**9,)

SMALL = (10**5, 10**6, 10**6, 10**7)
MIXED = (10**6, 10**7, 10**8, 10**9, 3 * 10**9)
LARGE = (10**10, 10**11)


class Computed(NamedTuple):
    """A computed request: its arrival, its latency and its FLOPs."""

    arrival: float
    latency: float
    flops: int


@dataclass
class Seen:
    """The outcome of each caller's requests: those computed, and the arrival times of those refused."""

    computed: dict[Hashable, list[Computed]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[Hashable, list[float]] = field(default_factory=lambda: defaultdict(list))

    def p99(self, *callers: Hashable, since: float = 0.0) -> float:
        """The p99 latency of these callers, or of all."""
        chosen = callers or tuple(self.computed)
        latencies = [each.latency for who in chosen for each in self.computed[who] if each.arrival >= since]
        return float(np.percentile(latencies, 99))

    def by(self, end: float) -> list[Computed]:
        """The requests computed by then."""
        return [each for every in self.computed.values() for each in every if each.arrival + each.latency <= end]

    def flops(self, caller: Hashable) -> int:
        """The FLOPs computed for a caller."""
        return sum(each.flops for each in self.computed[caller])


Arrival: TypeAlias = tuple[float, Hashable, int, int]
"""Time, caller, FLOPs and priority."""


def poisson(
    rate: float, seconds: float, sizes: Sequence[int], caller: Hashable, priority: int = 0, begin: float = 0.0
) -> Iterator[Arrival]:
    """Requests of one caller at `rate` a second, as a Poisson process."""
    generator, now = random.Random(f"{caller} {rate}"), begin
    while (now := now + generator.expovariate(rate)) < begin + seconds:
        yield now, caller, generator.choice(sizes), priority


class Simulation:
    """A server and its device."""

    def __init__(self, device: Device, layer: str | None = None) -> None:
        """All requests apply `layer`, if it is given."""
        self.admission = OpenAdmission(4096, 2 * 2**30, 2 * 10**16, None, MAX_QUEUE_TIME)
        self.seen = Seen()
        self._device = device
        self._layer = layer
        self._queue: BatchQueue[Entry] = BatchQueue(
            MAX_BATCH_FLOPS, MAX_BATCH_REQUESTS, AGING, self.admission.pace, None, CUDA_LAYER_DISCOUNT
        )
        self._running: list[Entry] = []
        self._end = 0.0

    def serve(self, *streams: Iterator[Arrival]) -> Seen:
        """Serves requests that arrive regardless of replies (open loop), until all are done."""
        for now, caller, flops, priority in heapq.merge(*streams):
            self._work_until(now)
            try:
                self.admission.admit(caller, 1, flops)
            except Overloaded:
                self.seen.refused[caller].append(now)
                continue
            self._queue.push(Entry(now, cost=flops, caller=caller, priority=priority, layer=self._layer))
            if not self._running:
                self._begin(now)
        self._work_until(math.inf)
        return self.seen

    def _begin(self, now: float) -> None:
        batch = self._queue.pop(now)
        self._running = batch.entries
        seconds = self._device.seconds(len(self._running), sum(entry.cost for entry in self._running))
        self.admission.pace.learn(batch.work, seconds)
        self._end = now + seconds

    def _work_until(self, now: float) -> None:
        while self._running and self._end <= now:
            for entry in self._running:
                self.admission.computed(entry.caller, 1, entry.cost)
                self.admission.release(entry.caller, entry.received_bytes)
                done = Computed(entry.arrival, self._end - entry.arrival, entry.cost)
                self.seen.computed[entry.caller].append(done)
            self._running = []
            if self._queue.requests:
                self._begin(self._end)


def capacity(device: Device, sizes: Sequence[int]) -> float:
    """Requests per second at full load, in batches as full as they can be."""
    mean = sum(sizes) / len(sizes)
    batch = max(1.0, min(MAX_BATCH_REQUESTS, MAX_BATCH_FLOPS / mean))
    return batch / (device.batch + batch * (device.request + mean * device.flop))


def offered(times: float, device: Device, sizes: Sequence[int], callers: int, requests: int) -> tuple[Seen, float]:
    """Offers `times` the capacity for as long as a server at full load needs for `requests` requests: the outcome, and
    how long that is.
    """
    rate = capacity(device, sizes)
    seconds = requests / rate
    each = [poisson(times * rate / callers, seconds, sizes, caller) for caller in range(callers)]
    return Simulation(device).serve(*each), seconds


@pytest.mark.parametrize("callers", [1, 4, 32])
@pytest.mark.parametrize(
    ("device", "sizes", "requests"),
    [(SMALL_CPU, SMALL, 8000), (SMALL_CPU, MIXED, 1500), (SMALL_CPU, LARGE, 1000), (ACCELERATOR, LARGE, 4000)],
    ids=["small requests", "mixed ones", "large ones", "an accelerator"],
)
def test_ten_times_the_load(device: Device, sizes: Sequence[int], requests: int, callers: int) -> None:
    """Goodput holds, and so does the latency of accepted requests once the initial queue has drained."""
    full, end = offered(1.5, device, sizes, callers, requests)
    steady, _ = offered(0.9, device, sizes, callers, requests)
    flood, _ = offered(10, device, sizes, callers, requests)
    for goodput in (len, lambda every: sum(each.flops for each in every)):
        assert goodput(flood.by(end)) >= 0.9 * goodput(full.by(end))
    settled = min(end / 2, 3 * MAX_QUEUE_TIME)
    # Where requests take a fraction of a millisecond, one per caller, with many callers, is a longer queue than needed.
    assert flood.p99(since=settled) <= max(3 * steady.p99(), 0.1)
    if callers <= 4:  # with more, there are fewer places than callers, and chance decides
        shares = [flood.flops(caller) for caller in range(callers)]
        assert max(shares) <= 1.2 * min(shares) + 2 * max(sizes)


@pytest.mark.parametrize("callers", [1, 32])
def test_a_flood_of_steps_of_a_decoder_runs_in_full_batches(callers: int) -> None:
    """Whose operations hardly count, so that a batch has many: as many must be let in, and no more."""
    full = DECODER.seconds(MAX_BATCH_REQUESTS, 0)
    rate, seconds = MAX_BATCH_REQUESTS / full, 5.0
    streams = (poisson(10 * rate / callers, seconds, STEPS, caller) for caller in range(callers))
    seen = Simulation(DECODER, layer="decoder").serve(*streams)
    assert sum(map(len, seen.refused.values())) > 5 * rate * seconds
    assert len(seen.by(seconds)) >= 0.9 * rate * seconds
    assert seen.p99(since=3 * MAX_QUEUE_TIME) <= 8 * full


def test_a_flood_leaves_alone_who_sends_little() -> None:
    rate, seconds = capacity(SMALL_CPU, MIXED), 30.0
    seen = Simulation(SMALL_CPU).serve(
        poisson(10 * rate, seconds, MIXED, "flood"), poisson(0.2 * rate, seconds, MIXED, "little")
    )
    assert len(seen.refused["little"]) <= 0.02 * len(seen.computed["little"])
    assert seen.p99("little") < seen.p99("flood")
    assert seen.p99("little") < 0.5
    assert seen.flops("flood") > 2 * seen.flops("little"), "what is left is the flood's"


def test_low_priority_gets_through_a_flood_of_high_priority() -> None:
    rate, seconds = capacity(SMALL_CPU, MIXED), 30.0
    for low in ("flood", "another"):  # also when it is the same caller's
        seen = Simulation(SMALL_CPU).serve(
            poisson(10 * rate, seconds, MIXED[:-1], "flood", priority=8),
            poisson(0.2 * rate, seconds, MIXED[-1:], low, priority=-8),
        )
        assert any(each.flops == MIXED[-1] for each in seen.computed[low])
        longest = max(each.latency for every in seen.computed.values() for each in every)
        assert longest < 16 * AGING + 3 * MAX_QUEUE_TIME


def test_it_is_back_to_normal_when_the_flood_ends() -> None:
    rate = capacity(SMALL_CPU, MIXED)
    simulation = Simulation(SMALL_CPU)
    seen = simulation.serve(
        poisson(10 * rate, 10.0, MIXED, "flood"), poisson(0.5 * rate, 10.0, MIXED, "after", begin=11.0)
    )
    assert seen.refused["flood"]
    assert not seen.refused["after"]
    alone = Simulation(SMALL_CPU).serve(poisson(0.5 * rate, 10.0, MIXED, "after", begin=11.0))
    assert seen.p99("after") <= 1.5 * alone.p99("after")


def test_a_burst_after_quiet_is_taken_whole() -> None:
    """A thousand requests at once from a caller that then sends no more: that is no overload."""
    burst = iter([(1.0, "burst", 10**6, 0)] * 1000)
    seen = Simulation(SMALL_CPU).serve(poisson(20, 1.0, SMALL, "before"), burst)
    assert not seen.refused
    assert len(seen.computed["burst"]) == 1000
