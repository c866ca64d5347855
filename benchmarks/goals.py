"""The service's goals, and what a run reached: bounds relative to the better peer and to the limits.

In: the results of workloads. Out: `Goal`s, by the figures of encoded messages on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchmarks.growth import Growth
from benchmarks.measure import IN_PROCESS, NO_COMPUTE, SERVICE
from benchmarks.results import Curve, WorkloadResult, by_concurrency
from benchmarks.waiting import Waiting


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio to reach: its description, the bound, and the measured value, None if it was not measured."""

    workload: str
    what: str
    bound: float
    at_least: bool
    found: float | None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None if it was not measured."""
        if self.found is None:
            return None
        return self.found >= self.bound if self.at_least else self.found <= self.bound


_Measure: TypeAlias = Callable[[WorkloadResult], float | None]


def _of_peer(result: WorkloadResult) -> float | None:
    peer = result.best_peer()
    return None if peer is None else result.ratio(SERVICE, peer)


def _of_transport(result: WorkloadResult) -> float | None:
    return result.ratio(SERVICE, NO_COMPUTE)


def _latency_of_peer(result: WorkloadResult) -> float | None:
    peers = [value for way in result.peer_ways() if (value := result.median(way, "p50_us")) is not None]
    return _over(result.median(SERVICE, "p50_us"), min(peers, default=None))


def _latency_of_transport(result: WorkloadResult) -> float | None:
    return _over(result.median(SERVICE, "p50_us"), result.median(NO_COMPUTE, "p50_us"))


def _cpu(result: WorkloadResult) -> float | None:
    """The server's CPU time over the sum of torch's in process and that of a server that computes nothing."""
    compute, transport = result.median(IN_PROCESS, "client_cpu_us"), result.median(NO_COMPUTE, "server_cpu_us")
    if compute is None or transport is None:
        return None
    return _over(result.median(SERVICE, "server_cpu_us"), compute + transport)


def _step(result: WorkloadResult) -> float | None:
    """The median latency over the sum of torch's in process and that of a server that computes nothing."""
    compute, transport = result.median(IN_PROCESS, "p50_us"), result.median(NO_COMPUTE, "p50_us")
    if compute is None or transport is None:
        return None
    return _over(result.median(SERVICE, "p50_us"), compute + transport)


def _of_torch(result: WorkloadResult) -> float | None:
    return result.ratio(SERVICE, IN_PROCESS)


def _tail_of_peer(result: WorkloadResult) -> float | None:
    """The 99th percentile at the highest share of the server's own capacity, over that of the peer with the lowest."""
    share = max((each.share for each in result.open), default=0.0)
    own, others = None, []
    for each in result.open:
        figure = each.figures["p99_us"]
        if figure is None or each.way != each.of or each.share != share:
            continue
        if each.way == SERVICE:
            own = figure.median
        else:
            others.append(figure.median)
    return _over(own, min(others, default=None))


def _tail_at_the_peers_load(result: WorkloadResult) -> float | None:
    """The 99th percentile at the highest share of the better peer's capacity, over that of this peer."""
    share = max((each.share for each in result.open), default=0.0)
    tails = {(each.way, each.of): each.figures["p99_us"] for each in result.open if each.share == share}
    for (way, of), own in tails.items():
        peers = tails.get((of, of))
        if way == SERVICE != of and own is not None and peers is not None:
            return _over(own.median, peers.median)
    return None


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


PEER, LIMIT, CPU = "requests/s, of the better peer", "requests/s, of no compute", "server CPU, of torch + no compute"
STEP = "p50, of torch in process + no compute"

GOALS: Final[tuple[tuple[str, str, float, bool, _Measure], ...]] = (
    ("S", PEER, 1.5, True, _of_peer),
    ("S", LIMIT, 0.9, True, _of_transport),
    ("S1", "p50, of the better peer's", 0.35, False, _latency_of_peer),
    ("S1", "p50, of no compute", 1.3, False, _latency_of_transport),
    ("M", PEER, 1.5, True, _of_peer),
    ("L", PEER, 1.4, True, _of_peer),
    ("L", CPU, 1.15, False, _cpu),
    ("A", PEER, 1.3, True, _of_peer),
    ("A", CPU, 1.15, False, _cpu),
    ("B", PEER, 1.25, True, _of_peer),
    ("B", CPU, 1.15, False, _cpu),
    ("D", "requests/s, of sending K and V to the better peer", 20.0, True, _of_peer),
    ("D", STEP, 1.5, False, _step),
    ("DA", STEP, 1.5, False, _step),
    ("D64", "requests/s, of torch in process", 0.8, True, _of_torch),
    ("X", "p99 at 90 % of its own capacity, of the better peer's at that of its own", 0.5, False, _tail_of_peer),
    ("X", "p99 at 90 % of the better peer's capacity, of the peer's", 0.5, False, _tail_at_the_peers_load),
)
"""The workload, what is compared, the bound, whether it is a lower bound, and how it is measured."""


WAITING: Final = 1.2
"""The most memory that a waiting request may take, relative to its size."""


FLAT: Final = 1.2
"""Up to this ratio of the highest to the lowest, costs are called flat."""


GROWING: Final = ("append", "fork")
"""The operations on caches whose costs must not depend on their length."""


def goals(
    results: Sequence[WorkloadResult],
    waiting: Sequence[Waiting] = (),
    curves: Sequence[Curve] = (),
    growth: Sequence[Growth] = (),
) -> list[Goal]:
    """The goals of the workloads that were measured; for memory, one per size, of the way that takes most; and for
    caches that grow, one per operation, in process and over the wire.
    """
    by_name = {result.name: result for result in results}
    found = [
        Goal(name, what, bound, at_least, measure(by_name[name]))
        for name, what, bound, at_least, measure in GOALS
        if name in by_name
    ]
    for size in dict.fromkeys(each.payload for each in waiting):
        worst = max((each for each in waiting if each.payload == size), key=lambda each: each.ratio)
        what = f"memory of a waiting request of {size / 1024:,.0f} KiB, of its size ({worst.way.partition(', ')[2]})"
        found.append(Goal("", what, WAITING, at_least=False, found=worst.ratio))
    for curve in by_concurrency(curves):
        what = "server CPU per token from 1 to 256 in flight, the highest of the lowest"
        found.append(Goal(curve.name.split()[-1], what, FLAT, at_least=False, found=curve.unevenness(SERVICE)))
    for each in growth:
        if each.name.partition(",")[0] in GROWING:
            what = f"p50 of {each.name}: {each.much}, of {each.little}"
            found.append(Goal("", what, FLAT, at_least=False, found=_over(each.much_us, each.little_us)))
    return found
