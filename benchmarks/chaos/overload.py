"""A server that is offered ten times as much as it can do, by callers who do not wait for its answers."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Final

import grpc
import numpy as np
import psutil  # type: ignore[import-untyped]
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attnserve.v1 import attention_pb2 as pb
from benchmarks.chaos import encoder
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.processors import apart
from benchmarks.chaos.victim import Victim
from benchmarks.chaos.ways import Stream, Way

PROMISE: Final = (
    "Offered ten times its capacity in an open loop of mixed sizes, the server keeps at least 90 % of its goodput at "
    "full load; the 99th percentile latency of what it accepts is within 3 times that at 90 % load; the rest is "
    "refused at once with RESOURCE_EXHAUSTED and a delay that follows from the queue; memory is bounded, health "
    "answers throughout, and a second after the end everything is as before."
)

TIMES: Final = 10
LENGTHS: Final = (16, 32, 64, 64, 128, 128, 256, 384)
"""Tokens of the requests, in a random order."""
CALLERS: Final = 4
"""How many connections there are. Nobody is identified, so the server takes each for a caller."""
IN_FLIGHT: Final = 16
"""How many calls the closed loop that finds the capacity has in flight; with more, the rate is the same."""
LEAD: Final = 0.1
"""A load runs for this share of its time before what is computed counts. A load that has just begun or is about to end
computes its short requests first: rates would be too low in tokens, and too high in requests.
"""
MOST_MINUTES: Final = 1.0
LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
REFUSED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
PATIENCE_S: Final = 60.0
MOST_REFUSED: Final = 1.2
"""How many refused attempts each call may have, on average. If callers all came back, there would be twice as many.
"""


@dataclass(slots=True)
class Answers:
    """What callers have seen.

    - `computed`: for calls that were computed, the seconds until the answer; `tokens` is the sum of their tokens.
    - `refused`: for calls that were refused, the seconds until the refusal; `delays`: the delays that they were told.
    - `late`: the messages of calls whose own time was over before; `failed`: those of other failures.
    """

    counted: tuple[float, float]
    """The begin and the end of the time in which answers count."""
    calls: int = 0
    """How many calls were made, whether their answers count or not."""
    computed: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    processor_seconds: float = 0.0
    """The processor time that the server has used in the time that counts."""

    @property
    def seconds(self) -> float:
        """How long the time that counts is."""
        begin, until = self.counted
        return until - begin

    @property
    def requests_per_second(self) -> float:
        """The goodput in requests."""
        return len(self.computed) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """The goodput in tokens."""
        return self.tokens / self.seconds

    @property
    def seconds_per_token(self) -> float:
        """The latency per token of what was computed. (A median over mixed lengths would be that of one length.)"""
        return sum(self.computed) / self.tokens


class Load:
    """Sends requests of all lengths, from several callers in turn, each with a connection; all ask in the same way."""

    def __init__(self, victim: Victim, way: type[Way]) -> None:
        self._way = way
        self._address = victim.address
        self._process = psutil.Process(victim.process.pid)
        self._stack = AsyncExitStack()
        self._callers: list[Way] = []
        self._requests = [
            (length, pb.ApplyRequest.FromString(encoder.request(length, seed))) for seed, length in enumerate(LENGTHS)
        ]
        self._random = np.random.default_rng(0)
        self._round: list[int] = []
        """Which requests are next in a closed loop. There, lengths come in rounds, so that all come equally often;
        otherwise the capacity would depend on what was drawn. An open loop has no rounds: when a long request has
        filled the server, those left in its round are shorter, so that what is refused would be shorter than what is
        accepted.
        """
        self._numbers = count()

    async def __aenter__(self) -> Load:
        for _ in range(CALLERS):
            self._callers.append(caller := self._way(self._address))
            self._stack.push_async_callback(caller.close)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def _next_in_round(self) -> int:
        if not self._round:
            self._round = self._random.permutation(len(self._requests)).tolist()
        return self._round.pop()

    async def _ask(self, which: int, answers: Answers, due: float) -> None:
        """Makes one call. A computed answer counts if it comes within `answers.counted`. Times are from when the call
        was due.
        """
        length, request = self._requests[which]
        answers.calls += 1
        reply = await self._callers[next(self._numbers) % CALLERS].ask(request)
        if reply.HasField("error"):
            if reply.error.code == REFUSED and (delay := _delay(reply.error)) is not None:
                answers.refused.append(perf_counter() - due)
                answers.delays.append(delay)
            else:
                late = reply.error.code == LATE and self._way.timeout is not None
                (answers.late if late else answers.failed).append(reply.error.message)
            return
        begin, until = answers.counted
        if begin <= (now := perf_counter()) <= until:
            answers.computed.append(now - due)
            answers.tokens += length

    async def closed(self, in_flight: int, seconds: float) -> Answers:
        """Keeps so many calls in flight for some seconds."""
        async with self._measured(seconds) as answers:

            async def caller() -> None:
                while (now := perf_counter()) < answers.counted[1]:
                    await self._ask(self._next_in_round(), answers, now)

            await asyncio.gather(*(caller() for _ in range(in_flight)))
        return answers

    async def open(self, rate: float, seconds: float) -> Answers:
        """Makes so many calls a second, at random times (a Poisson process), without waiting for their answers."""
        due = perf_counter()
        async with self._measured(seconds) as answers, asyncio.TaskGroup() as calls:
            while (due := due + self._random.exponential(1 / rate)) < answers.counted[1]:
                await asyncio.sleep(max(0.0, due - perf_counter()))
                which = int(self._random.integers(len(self._requests)))
                calls.create_task(self._ask(which, answers, due))
        return answers

    @asynccontextmanager
    async def _measured(self, seconds: float) -> AsyncIterator[Answers]:
        """The answers to a load that the block makes for so many seconds."""
        now = perf_counter()
        answers = Answers((now + LEAD * seconds, now + seconds))
        watch = asyncio.create_task(self._watch_processor(answers))
        yield answers
        await watch

    async def _watch_processor(self, answers: Answers) -> None:
        """Fills in how much of its processors the server uses while answers count."""
        for moment, sign in zip(answers.counted, (-1, 1), strict=True):
            await asyncio.sleep(moment - perf_counter())
            times = self._process.cpu_times()
            answers.processor_seconds += sign * (times.user + times.system)


def _delay(status: Status) -> float | None:
    """After how many seconds to come back, if the error says so."""
    for detail in status.details:
        info = RetryInfo()
        if detail.Unpack(info):
            return float(info.retry_delay.seconds + info.retry_delay.nanos * 1e-9)
    return None


@dataclass(slots=True)
class Watch:
    """What is seen of a server from outside: its resident memory, and how long its health took to answer."""

    bytes: list[int] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    unhealthy: int = 0


@contextmanager
def watched(victim: Victim) -> Iterator[Watch]:
    """Looks ten times a second while the block runs, over HTTP and gRPC, on connections of its own."""
    watch, stop = Watch(), threading.Event()
    process = psutil.Process(victim.process.pid)

    def look() -> None:
        with grpc.insecure_channel(victim.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while not stop.wait(0.1):
                watch.bytes.append(process.memory_info().rss)
                begin = perf_counter()
                serving = check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status == SERVING
                watch.health.append(perf_counter() - begin)
                watch.unhealthy += not serving or victim.get("/readyz") != 200

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


SERVING: Final = health_pb2.HealthCheckResponse.SERVING


async def _measure(victim: Victim, seconds: float, way: type[Way]) -> list[Figure]:
    async with Load(victim, way) as load:
        await load.closed(IN_FLIGHT, seconds / 6)  # until it knows its rate
        before = psutil.Process(victim.process.pid).memory_info().rss
        with watched(victim) as watch:  # all the time, because to watch costs both loads alike
            full = [await load.closed(IN_FLIGHT, seconds / 6)]
            steady = await load.open(0.9 * full[0].requests_per_second, seconds / 2)
            alone = await load.closed(1, seconds / 12)
            refused_before = victim.rejections()
            flood = await load.open(TIMES * full[0].requests_per_second, seconds)
            attempts_refused = victim.rejections() - refused_before
            await asyncio.sleep(1.0)
            waiting = victim.metric("attnserve_in_flight_requests")
            after = await load.closed(1, seconds / 12)
            full.append(await load.closed(IN_FLIGHT, seconds / 6))  # before and after: machines drift
    requests, tokens, work = (
        float(np.mean(each))
        for each in (
            [one.requests_per_second for one in full],
            [one.tokens_per_second for one in full],
            [one.tokens / one.processor_seconds for one in full],
        )
    )
    p99 = [float(np.percentile(answers.computed, 99)) for answers in (steady, flood)]
    return [
        Figure("capacity", requests, "requests/s"),
        Figure("offered", flood.calls / seconds, "requests/s"),
        Figure("goodput, in requests", flood.requests_per_second / requests, "of capacity", 0.9),
        Figure("goodput, in tokens", flood.tokens_per_second / tokens, "of capacity", 0.9),
        Figure(
            "the server's processor time spent refusing", 100 - 100 * flood.tokens / flood.processor_seconds / work, "%"
        ),
        Figure("p99 at 90 % load", p99[0] * 1e3, "ms"),
        Figure("p99 of accepted requests", p99[1] * 1e3, "ms"),
        Figure("this p99 over that at 90 % load", p99[1] / p99[0], at_most=way.slower),
        Figure("refused", len(flood.refused) / seconds, "requests/s"),
        Figure("refused attempts", attempts_refused / flood.calls, "for each call", at_most=MOST_REFUSED),
        Figure("median time to a refusal", float(np.median(flood.refused)) * 1e3, "ms", at_most=1e3 * way.told_within),
        Figure("p99 time to a refusal", float(np.percentile(flood.refused, 99)) * 1e3, "ms"),
        Figure("median delay told", float(np.median(flood.delays)) * 1e3, "ms", 5.0, p99[1] * 1e3),
        Figure("calls whose own time was over", len(flood.late) / flood.calls, "of all", at_most=0.01),
        exactly("calls that failed otherwise", len(flood.failed), 0),
        Figure("memory above that of the idle server", (max(watch.bytes) - before) / 2**20, "MiB", at_most=512.0),
        Figure("health checks answered", len(watch.health), at_least=1),
        exactly("of these, that the server is not ready", watch.unhealthy, 0),
        Figure("p99 of a health check", float(np.percentile(watch.health, 99)) * 1e3, "ms", at_most=1000.0),
        exactly("requests in flight 1 s after the end", waiting, 0),
        Figure(
            "latency of single requests then, per token",
            after.seconds_per_token / alone.seconds_per_token,
            "of that before",
            at_most=1.5,
        ),
    ]


def run(minutes: float, way: type[Way] = Stream) -> list[Figure]:
    """Runs the experiment, with a minute of overload at most, by callers who ask in this way."""
    with tempfile.TemporaryDirectory(prefix="attnserve-overload-") as directory:
        layers = encoder.write(Path(directory))
        victim = Victim("--layers", str(layers), "--cache-bytes", "1MiB", "--log-level", "error")
        with apart(victim) as (of_server, of_callers):
            figures = asyncio.run(_measure(victim, 60 * min(minutes, MOST_MINUTES), way))
        return [
            Figure("processors of the server", of_server),
            Figure("processors of the callers, separate if possible", of_callers),
            *figures,
        ]
