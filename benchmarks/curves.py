"""How cost grows: throughput and latency by the number in flight, the length, the cached length, the payload.

In: peers, and how long to measure. Out: a `Curve` for each variable. Every answer is checked; each point is measured
only once, so that a curve shows a shape and not figures to rely on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmarks.attention import Attention
from benchmarks.decode import Decode
from benchmarks.measure import NO_COMPUTE, SERVICE, Way, check, closed, servers
from benchmarks.peers.peer import Peer
from benchmarks.plain import Array
from benchmarks.results import IN_FLIGHT, Curve, Point
from benchmarks.servers import Running
from benchmarks.workload import HEAD_DIM, HEADS, Workload
from benchmarks.workloads import BRAIN, WORKLOADS

MANY: Final = 64
"""With more requests in flight than this, measurements take longer."""


@dataclass(frozen=True)
class Growing:
    """A variable, its description and unit, and the workload at each of its values. Peers are measured with the
    settings that are fastest for the workload `tuned`; not at all if that is None.
    """

    name: str
    description: str
    unit: str
    workloads: dict[int, Workload]
    tuned: str | None = None

    @property
    def operation(self) -> str:
        """The name of the operation that is requested."""
        return next(iter(self.workloads.values())).operation.field


@dataclass(frozen=True)
class Payload(Attention):
    """A query of one head over keys and values of `lengths` tokens."""

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


ALONE: Final = Attention("curves with 1 in flight", 1, (1024,))
"""The workload that peers are tuned for, where curves have one request in flight."""


def _concurrency(workload: Workload, description: str, tuned: str | None = None) -> Growing:
    """A workload with 1, 2, 4 ... 256 in flight."""
    counts = [1 << power for power in range(9)]
    points = {count: replace(workload, name=f"{count} in flight", in_flight=count) for count in counts}
    name = f"concurrency of {workload.name}"
    return Growing(name, description, IN_FLIGHT, points, tuned)


CURVES: Final = (
    _concurrency(WORKLOADS["S"], f"attention over 16 tokens, {HEADS} heads of {HEAD_DIM}", "S"),
    _concurrency(WORKLOADS["M"], f"attention over 128 tokens, {HEADS} heads of {HEAD_DIM}"),
    _concurrency(WORKLOADS["A"], "a resident layer over 16 tokens"),
    Growing(
        "length",
        f"causal attention, {HEADS} heads of {HEAD_DIM}, 1 in flight",
        "tokens",
        {length: Attention(f"{length} tokens", 1, (length,)) for length in (1, 16, 128, 1024, 8192)},
        ALONE.name,
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
        ALONE.name,
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
    """The workloads at all points of some curves."""
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
    """Measures curves; those of the same operation and peers' settings share one server of each kind. Raises
    WrongAnswerError.
    """
    found: dict[str, Curve] = {}
    for operation, tuned in dict.fromkeys((kind.operation, kind.tuned) for kind in kinds):
        asking = [kind for kind in kinds if (kind.operation, kind.tuned) == (operation, tuned)]
        pool = max(workload.cache_bytes for workload in points(asking))
        compared = () if tuned is None else peers
        with servers(points(asking)[0], compared, server_flags, progress, pool, tuned) as (_, ways):
            chosen = {SERVICE: ways[SERVICE], NO_COMPUTE: Way(echo, ways[SERVICE].load, values=False)}
            chosen |= {name: way for name, way in ways.items() if way.peer is not None and "stream" not in name}
            for kind in asking:
                found[kind.name] = _curve(loop, kind, chosen, seconds, progress)
    return [found[kind.name] for kind in kinds]


def _curve(
    loop: asyncio.Runner, kind: Growing, ways: Mapping[str, Way], seconds: float, progress: Callable[[str], None]
) -> Curve:
    measured: dict[str, list[Point]] = {}
    refused: dict[str, dict[str, int]] = {}
    for name, way in ways.items():
        progress(f"{kind.name}: {name}")
        measured[name] = [
            _point(loop, way, name, value, workload, seconds) for value, workload in kind.workloads.items()
        ]
        if way.refused:
            refused[name] = dict(way.refused)
            way.refused.clear()
    return Curve(kind.name, kind.description, kind.unit, measured, refused)


def _point(loop: asyncio.Runner, way: Way, name: str, value: int, workload: Workload, seconds: float) -> Point:
    check(loop, workload, name, way)
    # With many requests in flight, each would be answered only a few times in a short time.
    figures = closed(loop, way, workload, seconds * max(1.0, workload.in_flight / MANY))
    rate, cpu = figures["requests_per_second"], figures["server_cpu_us"]
    assert rate is not None
    return Point(value, rate, figures["p50_us"], None if cpu is None else cpu / workload.mean_tokens)
