"""Devices that fail for good: lost; stuck, on the event loop or on a thread beside it; with a thread that dies."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attnserve import Client, UnavailableError
from attnserve_server.exit_statuses import DEVICE_FAILED
from benchmarks.chaos.callers import PATIENCE_S, Tally, in_threads
from benchmarks.chaos.faulty import FAULTS
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.questions import Question
from benchmarks.chaos.victim import Victim, start_all

PROMISE: Final = (
    "A device that is lost for good, a batch that does not end, a computing thread that dies: everybody who waits is "
    "told UNAVAILABLE and nobody hangs; liveness fails, unless the event loop itself is stuck; the process ends by "
    "itself, with a message and an exit status of its own, so that it is restarted."
)
ON_THE_LOOP: Final = "stuck on the loop"
CASES: Final = {
    "lost": ("lost", "--inline-flops", "1e7"),
    "stuck beside the loop": ("stuck", "--inline-flops", "0"),
    ON_THE_LOOP: ("stuck", "--inline-flops", "1e7"),
    "dead thread": ("dead", "--inline-flops", "0"),
}
STUCK_AFTER: Final = "5s"
CALLERS: Final = 8


class _Watch:
    """Watches a server's liveness, and keeps what it is told."""

    def __init__(self, address: str) -> None:
        self.told: list[Any] = []
        self._serving = threading.Event()
        self._channel = grpc.insecure_channel(address)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        if not self._serving.wait(PATIENCE_S):
            raise TimeoutError("liveness is not told")

    def _watch(self) -> None:
        request = health_pb2.HealthCheckRequest(service="liveness")
        try:
            for answer in health_pb2_grpc.HealthStub(self._channel).Watch(request):
                self.told.append(answer.status)
                self._serving.set()
        except grpc.RpcError:
            return  # it has ended

    def end(self) -> bool:
        """Ends the watch. Returns whether the last that it was told is that the server is not alive."""
        self._thread.join(PATIENCE_S)
        self._channel.close()
        return bool(self.told[-1] == health_pb2.HealthCheckResponse.NOT_SERVING)


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a server ended after its device failed."""

    status: int
    answered: int
    unavailable: int
    otherwise: int
    wrong: int
    says_why: bool
    watched: bool


def run(minutes: float) -> list[Figure]:
    """Runs all cases at the same time, each on a server of its own."""
    del minutes
    victims = [
        Victim("--stuck-after", STUCK_AFTER, *flags, module="benchmarks.chaos.faulty") for _, *flags in CASES.values()
    ]
    faults = [fault for fault, *_ in CASES.values()]
    with ExitStack() as stack:
        for victim in victims:
            stack.push(victim)
        start_all(victims)
        with ThreadPoolExecutor(len(victims)) as pool:
            endings = dict(zip(CASES, pool.map(_break, faults, victims), strict=True))
    watched = [ending.watched for case, ending in endings.items() if case != ON_THE_LOOP]
    return [
        *(exactly(f"exit status, {case}", ending.status, DEVICE_FAILED) for case, ending in endings.items()),
        exactly("servers whose log says why", sum(ending.says_why for ending in endings.values()), len(CASES)),
        exactly("servers whose liveness failed, of those that could say so", sum(watched), len(watched)),
        Figure("calls answered before", sum(ending.answered for ending in endings.values()), at_least=20 * len(CASES)),
        Figure("calls told UNAVAILABLE", sum(ending.unavailable for ending in endings.values()), at_least=len(CASES)),
        exactly("calls that failed otherwise", sum(ending.otherwise for ending in endings.values()), 0),
        exactly("wrong answers", sum(ending.wrong for ending in endings.values()), 0),
    ]


def _break(fault: str, victim: Victim) -> _Ending:
    """Breaks the device of a server while it has callers. Raises TimeoutError if one of them hangs."""
    tally, watch = Tally(), _Watch(victim.address)
    with Client(victim.address, retries=0) as client, in_threads(client, CALLERS, tally):
        tally.until(20)
        question = Question.numbered(0)
        question.query.flat[0] = FAULTS[fault]
        tally.ask(client, question)
        status = victim.wait()
    unavailable = tally.errors.pop(UnavailableError.__name__, 0)
    return _Ending(
        status=status,
        answered=tally.right,
        unavailable=unavailable,
        otherwise=tally.failed,
        wrong=tally.wrong + tally.anothers,
        says_why="started again" in victim.stderr(),
        watched=watch.end(),
    )
