"""How cost grows: throughput and latency against the number in flight, the length, the cached length, the payload.

In: peers, and for how long to measure. Out: a `Curve` each. Every answer is checked; a point is measured once, so that
a curve shows a shape and not a figure to rely on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.attention import Attention
from benchmarks.decode import Decode
from benchmarks.measure import SERVICE, Way, check, closed, servers
from benchmarks.peers.peer import Peer
from benchmarks.plain import Array
from benchmarks.results import Curve, Point
from benchmarks.servers import Running
from benchmarks.workload import HEAD_DIM, HEADS, Workload
from benchmarks.workloads import BRAIN

TRANSPORT: Final = "transport, stream"


@dataclass(frozen=True)
class Growing:
    """What varies, in words and with its unit, and the workload at each of its values."""

    name: str
    description: str
    unit: str
    workloads: dict[int, Workload]


@dataclass(frozen=True)
class Payload(Attention):
    """A query of one head over keys and values of so many bytes together, as many tokens as `lengths` say."""

    @property
    def description(self) -> str:
        """In words."""
        return f"1 query of 1 head to {self.lengths[0]:,} tokens that are sent"

    def arrays(self, number: int) -> tuple[Array, Array, Array]:
        """Query [1, 1, D], key and value [1, S, D], unit-normal."""
        random = np.random.default_rng(number)
        key, value = (random.standard_normal((1, self.lengths[number], HEAD_DIM), dtype=np.float32) for _ in range(2))
        return random.standard_normal((1, 1, HEAD_DIM), dtype=np.float32), key, value

    def output_shape(self, number: int) -> tuple[int, ...]:
        """[1, 1, D]."""
        return (1, 1, HEAD_DIM)


BYTES_A_TOKEN: Final = 2 * HEAD_DIM * 4

CURVES: Final = (
    Growing(
        "concurrency",
        f"attention over 16 tokens, {HEADS} heads of {HEAD_DIM}",
        "requests in flight",
        {count: Attention(f"{count} in flight", count, (16,) * 16) for count in (1, 4, 16, 64, 256)},
    ),
    Growing(
        "length",
        f"causal attention, {HEADS} heads of {HEAD_DIM}, 1 in flight",
        "tokens",
        {length: Attention(f"{length} tokens", 1, (length,)) for length in (1, 16, 128, 1024, 8192)},
    ),
    Growing(
        "cached length",
        f"1 query to a resident cache, {HEADS} heads of {HEAD_DIM}, 1 in flight",
        "tokens in the cache",
        {tokens: Decode(f"{tokens} cached", 1, (1,), tokens=tokens) for tokens in (16, 256, 2048, 16_384, 65_536)},
    ),
    Growing(
        "payload",
        f"1 query of 1 head of {HEAD_DIM} to keys and values that are sent, 1 in flight",
        "bytes",
        {
            size: Payload(f"{size} bytes", 1, (size // BYTES_A_TOKEN,), causal=False)
            for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
        },
    ),
)


CUDA_CURVES: Final = (
    Growing(
        "length",
        f"causal attention, {BRAIN}, 1 in flight",
        "tokens",
        {
            length: Attention(f"{length} tokens", 1, (length,), shape=BRAIN, device="cuda")
            for length in (1, 16, 128, 1024, 4096, 16_384)
        },
    ),
    Growing(
        "cached length",
        f"1 query to a resident cache, {BRAIN}, 1 in flight",
        "tokens in the cache",
        {
            tokens: Decode(f"{tokens} cached", 1, (1,), tokens=tokens, shape=BRAIN, device="cuda")
            for tokens in (16, 256, 2048, 16_384, 131_072)
        },
    ),
)


def points(kinds: Sequence[Growing]) -> list[Workload]:
    """All points of some curves."""
    return [workload for kind in kinds for workload in kind.workloads.values()]


def curves(
    loop: asyncio.Runner,
    kinds: Sequence[Growing],
    echo: Running,
    peers: Sequence[Peer],
    seconds: float,
    *,
    server_flags: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Curve]:
    """Measures curves with one server of each kind. Raises WrongAnswerError."""
    pool = max(workload.cache_bytes for workload in points(kinds))
    found = []
    with servers(points(kinds)[0], peers, server_flags, progress, pool) as (_, ways):
        chosen = {SERVICE: ways[SERVICE], TRANSPORT: Way(echo, ways[SERVICE].load, values=False)}
        others = {name: way for name, way in ways.items() if not name.startswith("attnserve") and "stream" not in name}
        for kind in kinds:
            resident = any(isinstance(workload, Decode) for workload in kind.workloads.values())
            measured: dict[str, list[Point]] = {}
            for name, way in {**chosen, **({} if resident else others)}.items():
                progress(f"{kind.name}: {name}")
                measured[name] = [
                    _point(loop, way, name, value, workload, seconds) for value, workload in kind.workloads.items()
                ]
            found.append(Curve(kind.name, kind.description, kind.unit, measured))
    return found


def _point(loop: asyncio.Runner, way: Way, name: str, value: int, workload: Workload, seconds: float) -> Point:
    check(loop, workload, name, way)
    figures = closed(loop, way, workload, seconds)
    rate, p50 = figures["requests_per_second"], figures["p50_us"]
    assert rate is not None
    assert p50 is not None
    return Point(value, rate, p50)
