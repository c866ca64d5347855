"""Minutes of mixed traffic: good callers and bad ones, who cancel, vanish, talk nonsense and churn caches."""

from __future__ import annotations

import gc
import itertools
import re
import signal
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Final

import numpy as np
import psutil  # type: ignore[import-untyped]

from attnserve import Client
from benchmarks.chaos import projection
from benchmarks.chaos.callers import PATIENCE_S, TRANSPORTS, in_tasks, in_threads
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.traffic import KINDS, Kind, Record
from benchmarks.chaos.victim import Victim

PROMISE: Final = (
    "Minutes of mixed traffic, small and large, of attention, caches and layers, with cancellations, broken clients, "
    "bad input, and caches and layers that come and go: resident memory stays flat after warm-up; no task, thread, "
    "descriptor or cache page is leaked; every answer is right, and none goes to another caller (each request carries "
    "its number in its values)."
)
PAUSE_S: Final = 0.01
"""The pause of a caller between two turns, so that no kind crowds out the others."""
FLAGS: Final = ("--cache-bytes", "16MiB", "--cache-page-bytes", "16KiB", "--log-level", "error")
WARM_UP: Final = 0.3
"""The share of the time after which memory is to stay flat."""
GROWTH: Final = 5.0
"""By how much memory may grow, in percent. This is promised only if a run is long enough to tell growth from warm-up.
"""
POOLS: Final = 4
"""gRPC's pools of threads grow and shrink with what it did last, by so many threads. A leak would have thousands."""
LEAST_MINUTES: Final = 2.0
TASKS: Final = re.compile(r"^tasks: (\d+)$", re.MULTILINE)
DONE: Final = (
    "cancelled", "too late", "newcomers", "vanished", "garbage", "refused", "mutated", "caches", "large", "applied",
    "layers loaded",
)  # fmt: skip
"""What must have happened at least once, as callers of all kinds count it."""
WRONG: Final = ("wrong answers of caches", "wrong answers to large ones", "wrong answers of layers")
NOTHING_LEFT: Final = ("in_flight_requests", "in_flight_bytes", "queue_requests", "queue_bytes", "streams", "caches")


@dataclass(slots=True)
class _Footprint:
    """How much of the system a process uses."""

    threads: int
    descriptors: int
    tasks: int


def _growth(resident: Sequence[int]) -> float:
    """By how much the last third of the samples after warm-up is above the first, in percent, by their medians."""
    after = resident[int(len(resident) * WARM_UP) :]
    third = max(1, len(after) // 3)
    first, last = statistics.median(after[:third]), statistics.median(after[-third:])
    return 100 * (last - first) / first


def run(minutes: float) -> list[Figure]:
    """Runs the experiment."""
    with (
        TemporaryDirectory(prefix="attnserve-soak-") as directory,
        Victim(*FLAGS, "--layers", str(projection.write(Path(directory))), module="benchmarks.chaos.counted") as victim,
    ):
        process = psutil.Process(victim.process.pid)
        own = psutil.Process()
        record = Record(victim.address, victim.http_address)
        for kind in KINDS.values():  # one turn of each first: what is made only once is not to count as growth
            with Client(victim.address) as client:
                kind(client, np.random.default_rng(0), record)
        once = record.counts.copy()
        before = _settled(victim, process, None)
        own_before = _own(own)
        samples = _under_load(victim, process, record, 60 * minutes, once)
        after = _settled(victim, process, before)
        own_after = _own(own, own_before)
        left = {name: victim.metric(f"attnserve_{name}") for name in NOTHING_LEFT}
        pages = victim.metric('attnserve_cache_pool_bytes{state="used"}')
        log = victim.stderr()
    tally, counts = record.tally, record.counts
    odd = sum(count for name, count in counts.items() if name.startswith("mutated message"))
    growth = Figure("growth of resident memory after warm-up", round(_growth(samples), 2), "%")
    if minutes >= LEAST_MINUTES:
        growth = Figure(growth.name, growth.value, "%", at_most=GROWTH)
    return [
        growth,
        Figure("resident memory at the end", round(samples[-1] / 2**20), "MiB"),
        Figure("growth in threads", after.threads - before.threads, at_most=POOLS),
        Figure("growth in descriptors", after.descriptors - before.descriptors, at_most=0),
        Figure("growth in tasks", after.tasks - before.tasks, at_most=0),
        *(exactly(f"left at the end: {name}", value, 0) for name, value in left.items()),
        exactly("left at the end: bytes of cache pages", pages, 0),
        Figure("growth in the SDK's descriptors", own_after[0] - own_before[0], at_most=0),
        Figure("growth in the SDK's threads", own_after[1] - own_before[1], at_most=0),
        Figure(
            "answers checked, all correct",
            tally.right + sum(counts[name] for name in ("caches", "large", "applied")),
            at_least=1000 * min(1.0, minutes),
        ),
        exactly("wrong answers", tally.wrong, 0),
        *(exactly(name, counts[name], 0) for name in WRONG),
        exactly("answers for another caller", tally.anothers, 0),
        exactly("good calls that failed", tally.failed, 0),
        exactly("bad input that was answered", counts["bad input that was answered"], 0),
        exactly("mutated messages with the wrong error", odd, 0),
        *(Figure(name, counts[name] - once[name], at_least=1) for name in DONE),
        exactly("tracebacks in the log", log.count("Traceback"), 0),
    ]


def _under_load(
    victim: Victim, process: psutil.Process, record: Record, seconds: float, once: Mapping[str, int]
) -> list[int]:
    """Runs callers of all kinds, and returns samples of the server's resident memory. A short run goes on, for a while,
    until what is counted has happened more often than `once`.
    """
    samples = []
    with ExitStack() as stack:
        for transport in TRANSPORTS:
            client = stack.enter_context(Client(victim.address, transport=transport))
            stack.enter_context(in_threads(client, 1, record.tally))
            stack.enter_context(in_tasks(victim.address, 2, record.tally, transport=transport))
        client = stack.enter_context(Client(victim.address))
        for number, kind in enumerate(KINDS.values()):
            stack.enter_context(_repeating(kind, client, np.random.default_rng(number), record))
        end = monotonic() + seconds

        def lacks() -> bool:
            return any(record.counts[name] <= once[name] for name in DONE)

        while monotonic() < end or (monotonic() < end + PATIENCE_S and lacks()):
            samples.append(process.memory_info().rss)
            sleep(min(1.0, seconds / 30))
    return samples


@contextmanager
def _repeating(kind: Kind, client: Client, random: np.random.Generator, record: Record) -> Iterator[None]:
    """Has a caller of this kind take its turn again and again while the block runs. Raises what it did not expect."""
    stop = threading.Event()
    failures: list[Exception] = []

    def repeat() -> None:
        try:
            while not stop.wait(PAUSE_S):
                kind(client, random, record)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=repeat, name=kind.__name__)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    if thread.is_alive():
        raise TimeoutError(f"{kind.__name__} hangs")
    if failures:
        raise failures[0]


def _settled(victim: Victim, process: psutil.Process, no_more_than: _Footprint | None) -> _Footprint:
    """What the server uses once nothing is in flight, and it no longer changes or is down to what it was."""
    end, last = monotonic() + PATIENCE_S, None
    for _ in itertools.count():
        sleep(1.0)
        now = _Footprint(process.num_threads(), process.num_fds(), _tasks(victim))
        quiet = all(victim.metric(f"attnserve_{name}") == 0 for name in NOTHING_LEFT)
        goal = now == last if no_more_than is None else _within(now, no_more_than)
        if (quiet and goal) or monotonic() > end:
            return now
        last = now
    raise AssertionError


def _own(process: psutil.Process, no_more_than: tuple[int, int] | None = None) -> tuple[int, int]:
    """The descriptors and threads of this process. gRPC ends those of a channel only some time after it is closed."""
    end = monotonic() + PATIENCE_S
    while True:
        gc.collect()  # an event loop that is over lies in cycles, and gRPC's poller with it
        now = process.num_fds(), threading.active_count()
        if no_more_than is None or monotonic() > end:
            return now
        if now[0] <= no_more_than[0] and now[1] <= no_more_than[1]:
            return now
        sleep(0.1)


def _within(now: _Footprint, most: _Footprint) -> bool:
    return now.threads <= most.threads + POOLS and now.descriptors <= most.descriptors and now.tasks <= most.tasks


def _tasks(victim: Victim) -> int:
    """The tasks of the server's event loop."""
    told = len(TASKS.findall(victim.stderr()))
    victim.process.send_signal(signal.SIGUSR1)
    end = monotonic() + PATIENCE_S
    while len(found := TASKS.findall(victim.stderr())) == told:
        if monotonic() > end:
            raise TimeoutError("the server does not count its tasks")
        sleep(0.01)
    return int(found[-1])
