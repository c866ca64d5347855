"""More large requests at once than a server admits, by callers of the SDK who wait for their answers."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Final

import numpy as np
import psutil  # type: ignore[import-untyped]

from attnserve import AttnServeError, Client, OverloadedError, Transport
from benchmarks.chaos.callers import TRANSPORTS, running
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.overload import watched
from benchmarks.chaos.processors import apart
from benchmarks.chaos.questions import TOLERANCE, exact
from benchmarks.chaos.victim import Victim

PROMISE: Final = (
    "Ten times as many calls at once as keep the server busy, of 2 to 8 MiB each and more together than it admits, are "
    "answered at no less than 0.9 of the rate of those few, rightly, and hardly any is told that there is no room. "
    "Memory stays within three times `max_bytes`, for gRPC holds what arrives, and health answers throughout."
)
SECONDS: Final = 20.0
FEW: Final = 1
MANY: Final = 10
"""How many clients there are, each with a connection."""
IN_FLIGHT: Final = 4
"""How many calls each client has in flight."""
KEYS: Final = (512, 1024, 2048, 2048)
"""The keys of each call; each has one query, and 8 heads of 64, in float32."""
MAX_MIB: Final = 128
"""How much the server admits, in MiB."""


class Load:
    """Clients whose threads make one call after the other; and the outcomes of the calls."""

    def __init__(self, address: str, transport: Transport) -> None:
        self._address = address
        self._transport: Transport = transport
        normal = np.random.default_rng(0).standard_normal
        self._questions = [
            (normal((8, 1, 64), np.float32), normal((8, keys, 64), np.float32), normal((8, keys, 64), np.float32))
            for keys in KEYS
        ]
        self._answers = [exact(query, key, value, False) for query, key, value in self._questions]
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def rate(self, clients: int, seconds: float) -> float:
        """How many calls a second are answered, with so many clients."""
        stop, before = threading.Event(), self.outcomes["right"]
        with ExitStack() as stack:
            threads = []
            for number in range(clients):
                client = stack.enter_context(Client(self._address, transport=self._transport))
                threads += [
                    threading.Thread(target=self._ask, args=(client, number + n, stop)) for n in range(IN_FLIGHT)
                ]
            with running(threads, stop):
                stop.wait(seconds)
                answered = self.outcomes["right"] - before
        return answered / seconds

    def _ask(self, client: Client, first: int, stop: threading.Event) -> None:
        for number in itertools.count(first):
            if stop.is_set():
                return
            which = number % len(KEYS)
            try:
                output = client.attend(*self._questions[which]).output
            except OverloadedError:
                outcome = "refused"
            except AttnServeError as error:
                outcome = str(error)
            else:
                outcome = "right" if np.abs(output - self._answers[which]).max() <= TOLERANCE else "wrong"
            with self._lock:
                self.outcomes[outcome] += 1

    @property
    def refused(self) -> float:
        """The share of all calls that failed, after all attempts, because there is no room."""
        return self.outcomes["refused"] / self.outcomes.total()

    @property
    def failed(self) -> int:
        """How many calls failed for another reason than that there is no room."""
        return self.outcomes.total() - sum(self.outcomes[each] for each in ("right", "wrong", "refused"))


def run(minutes: float) -> list[Figure]:
    """Runs the experiment for 20 seconds with each transport, or for a third of `minutes` if that is less."""
    seconds = SECONDS * min(minutes, 1.0)
    figures = []
    for transport in TRANSPORTS:
        victim = Victim("--max-bytes", f"{MAX_MIB}MiB", "--max-message-bytes", "32MiB", "--log-level", "error")
        with apart(victim):
            figures += [
                Figure(f"{transport}: {figure.name}", figure.value, figure.unit, figure.at_least, figure.at_most)
                for figure in _measure(victim, Load(victim.address, transport), seconds)
            ]
    return figures


def _measure(victim: Victim, load: Load, seconds: float) -> list[Figure]:
    process = psutil.Process(victim.process.pid)
    load.rate(FEW, seconds / 4)  # until it knows its rate
    before = process.memory_info().rss
    with watched(victim) as watch:
        few = [load.rate(FEW, seconds / 2)]
        refused_before = victim.rejections()
        many = load.rate(MANY, seconds)
        refused = victim.rejections() - refused_before
        few.append(load.rate(FEW, seconds / 2))  # before and after: machines drift
    rate = float(np.mean(few))
    return [
        Figure(f"answers with {FEW * IN_FLIGHT} calls in flight", rate, "/s"),
        Figure(f"answers with {MANY * IN_FLIGHT}", many / rate, "of those", at_least=0.9),
        Figure("refused attempts", refused / seconds, "/s"),
        Figure("calls told that there is no room", load.refused, "of all", at_most=0.01),
        exactly("calls that failed otherwise", load.failed, 0),
        exactly("wrong answers", load.outcomes["wrong"], 0),
        Figure("memory above that of the idle server", (max(watch.bytes) - before) / 2**20, "MiB", at_most=3 * MAX_MIB),
        exactly("health checks that the server is not ready", watch.unhealthy, 0),
        Figure("p99 of a health check", float(np.percentile(watch.health, 99)) * 1e3, "ms", at_most=1000.0),
    ]
