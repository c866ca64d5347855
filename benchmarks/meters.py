"""What a load generator tells of each reply, and what is made of it: a count for a while, or a check of all answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Final, Protocol, TypeAlias

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.workload import Array, Workload

WARM_UP: Final = 0.2
"""The share of a measurement's time, before it, that is not counted."""


Reply: TypeAlias = bytes | memoryview | Array | torch.Tensor
"""An encoded reply, or an output."""


class Meter(Protocol):
    """What a load generator reports to."""

    def replied(self, number: int, sent_at: float, reply: Reply) -> bool:
        """A request, by its number, was answered. Says whether to go on."""


class WrongAnswerError(Exception):
    """An answer that is not what it must be: nothing wrong is worth timing."""


class Check:
    """Compares the answer to each request of a workload with the exact one, until all have come.

    Of a server that computes nothing, only the shape is compared.
    """

    def __init__(self, workload: Workload, way: str, *, values: bool = True) -> None:
        self._workload, self._way, self._values = workload, way, values
        self._missing = set(workload.numbers)

    def replied(self, number: int, sent_at: float, reply: Reply) -> bool:
        """Compares; raises WrongAnswerError."""
        del sent_at
        workload = self._workload
        output = workload.output(bytes(reply)) if isinstance(reply, bytes | memoryview) else np.asarray(reply)
        expected = workload.expected(number) if self._values else np.zeros(workload.output_shape(number))
        if output.shape != expected.shape:
            self._fail(number, f"has the shape {output.shape} instead of {expected.shape}")
        error = float(np.abs(output - expected).max()) if self._values else 0.0
        if not error <= workload.tolerance:  # nor is NaN
            self._fail(number, f"is off by {error:.1e}, where {workload.tolerance:.0e} is allowed")
        self._missing.discard(number)
        return bool(self._missing)

    def _fail(self, number: int, how: str) -> None:
        raise WrongAnswerError(f"workload {self._workload.name}, {self._way}: the answer to request {number} {how}")


@dataclass(slots=True)
class Measurement:
    """What was counted: the latency of each reply in seconds, their tokens, and the CPU time that passed meanwhile.

    CPU times are in seconds, those of the load generator, of the server, and of all else on the machine.
    """

    latencies: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    client_cpu: float = 0.0
    server_cpu: float = 0.0
    other_cpu: float = 0.0


class Clock:
    """Counts replies once the warm-up is over, until the time is.

    `server_cpu` reads the CPU time that the server has used, in seconds.
    """

    def __init__(self, workload: Workload, seconds: float, server_cpu: Callable[[], float]) -> None:
        self.measurement = Measurement()
        self._lengths = workload.lengths
        self._server_cpu = server_cpu
        self._begin = perf_counter() + seconds * WARM_UP
        self._seconds = seconds
        self._counting = self._over = False
        self._since = (0.0, 0.0, 0.0)

    def replied(self, number: int, sent_at: float, reply: Reply) -> bool:
        """Counts a reply; whether the time is not over."""
        del reply
        now = perf_counter()
        if self._counting:
            measurement = self.measurement
            measurement.latencies.append(now - sent_at)
            measurement.tokens += self._lengths[number]
            if now >= self._begin + self._seconds:
                self._counting, self._over = False, True
                self._read_clocks(now)
        elif not self._over and now >= self._begin:
            self._counting, self._begin = True, now
            self._since = self._clocks()
        return not self._over

    def _read_clocks(self, now: float) -> None:
        measurement = self.measurement
        measurement.seconds = now - self._begin
        client, server, machine = (after - before for before, after in zip(self._since, self._clocks(), strict=True))
        measurement.client_cpu, measurement.server_cpu = client, server
        # Clocks tick in hundredths of a second, each at its own moment.
        measurement.other_cpu = max(0.0, machine - client - server)

    def _clocks(self) -> tuple[float, float, float]:
        """The CPU time used so far by this process, by the server and by the machine."""
        machine = psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # On Linux, guests' time is in that of users too.
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return process_time(), self._server_cpu(), sum(machine) - idle - guests
