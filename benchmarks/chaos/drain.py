"""A server that is told to end in the middle of its work."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attnserve import Client
from benchmarks.chaos.callers import Tally, in_threads, until_all
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.victim import Victim

PROMISE: Final = (
    "SIGTERM under load: readiness goes false, work goes on for `--drain-delay`, then new work is refused with "
    "UNAVAILABLE; what is in flight is answered, streams end cleanly, the exit status is 0, and liveness stays true "
    "throughout, over HTTP and over gRPC."
)
CALLERS: Final = 6
DELAY: Final = "3s"


class _Prober:
    """Asks for liveness again and again, on connections of its own, as whatever restarts servers does."""

    def __init__(self, victim: Victim) -> None:
        self.answers: Counter[str] = Counter()
        self._victim = victim
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._probe)

    def __enter__(self) -> _Prober:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _probe(self) -> None:
        while not self._stop.is_set():
            status = self._victim.get("/healthz")
            if status is not None:
                self.answers["alive" if status == 200 else "dead"] += 1
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(self._victim.address, options) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                try:
                    answer = check(health_pb2.HealthCheckRequest(service="liveness"), timeout=30)
                except grpc.RpcError:
                    continue  # it has ended, or the probe came while it did
                self.answers["alive" if answer.status == health_pb2.HealthCheckResponse.SERVING else "dead"] += 1


def run(minutes: float) -> list[Figure]:
    """Runs the experiment, with callers that do not repeat a refused call."""
    del minutes
    tallies = {"stream": Tally(), "unary": Tally()}
    with Victim("--drain-delay", DELAY) as victim, ExitStack() as stack:
        prober = stack.enter_context(_Prober(victim))
        for transport, tally in tallies.items():
            client = stack.enter_context(Client(victim.address, transport=transport, retries=0))  # type: ignore[arg-type]
            stack.enter_context(in_threads(client, CALLERS, tally))
        until_all(tallies.values(), 100)
        victim.terminate()
        until_all(tallies.values(), 5)  # within the delay
        not_ready = victim.get("/readyz")
        status = victim.wait()
        stack.close()
        log = victim.stderr()
    errors = sum((tally.errors for tally in tallies.values()), Counter())
    refused = errors.pop("UnavailableError", 0)
    return [
        Figure("calls answered", sum(tally.right for tally in tallies.values()), at_least=200),
        exactly("wrong answers", sum(tally.wrong + tally.anothers for tally in tallies.values()), 0),
        Figure("calls refused with UNAVAILABLE", refused),
        exactly("calls that failed otherwise", errors.total(), 0),
        exactly("status of /readyz after SIGTERM", not_ready or 0, 503),
        Figure("liveness probes answered", prober.answers.total(), at_least=1),
        exactly("of these, that the server is dead", prober.answers["dead"], 0),
        exactly("exit status", status, 0),
        exactly("tracebacks in the log", log.count("Traceback"), 0),
    ]
