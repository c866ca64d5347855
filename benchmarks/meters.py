"""What load generators report replies to: a count over a period of time, or a check of all answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Final, Protocol, TypeAlias

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.arrivals import OpenLoop
from benchmarks.plain import Array
from benchmarks.workload import Workload

WARM_UP: Final = 0.2
"""The warm-up before a measurement, which is not counted, as a share of the measurement's time."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal or an error in place of an answer, as the server put it."""

    how: str


Reply: TypeAlias = bytes | memoryview | Array | torch.Tensor | Refused
"""An encoded reply, an output, or a refusal."""


class Meter(Protocol):
    """What a load generator reports to."""

    def replied(self, number: int, sent_at: float, reply: Reply) -> bool:
        """Takes the reply to a request, given by its number. Returns whether to go on."""


class WrongAnswerError(Exception):
    """A wrong answer: such a server is not worth timing."""


MOST_REFUSED: Final = 100
"""A server that refuses more requests than this during the check of its answers is taken not to serve them."""


class Check:
    """Compares the answer to each request of a workload with the exact one, until all have arrived.

    For a server that computes nothing, only the shape is compared. `output` reads the encoded reply to the request with
    a given number, and `expected` gives the exact answer; the defaults are the workload's.
    """

    def __init__(
        self,
        workload: Workload,
        way: str,
        *,
        values: bool = True,
        output: Callable[[int, bytes], Array] | None = None,
        expected: Callable[[int], Array] | None = None,
    ) -> None:
        self._workload, self._way, self._values = workload, way, values
        self._output = output or (lambda _, reply: workload.output(reply))
        self._expected = expected or workload.expected
        self._missing = set(workload.numbers)
        self._refused = 0

    def replied(self, number: int, sent_at: float, reply: Reply) -> bool:
        """Compares an answer; raises WrongAnswerError. A refused request is sent again."""
        del sent_at
        workload = self._workload
        if isinstance(reply, Refused):
            self._refused += 1
            if self._refused > MOST_REFUSED:
                self._fail(number, f"does not come: {reply.how}")
            return True
        output = self._array(number, reply)
        shape, rows = workload.output_shape(number), workload.rows(number)
        if output.shape != shape:
            self._fail(number, f"has the shape {output.shape} instead of {shape}")
        error = 0.0
        if self._values:
            error = float(np.abs(output[..., rows, :] - self._expected(number)).max())
        if not error <= workload.tolerance:  # written so that NaN fails, too
            self._fail(number, f"is off by {error:.1e}, where {workload.tolerance:.0e} is allowed")
        self._missing.discard(number)
        return bool(self._missing)

    def _array(self, number: int, reply: bytes | memoryview | Array | torch.Tensor) -> Array:
        if isinstance(reply, torch.Tensor):
            return reply.cpu().float().numpy()
        output = self._output(number, bytes(reply)) if isinstance(reply, bytes | memoryview) else np.asarray(reply)
        return output.astype(np.float32, copy=False)

    def _fail(self, number: int, how: str) -> None:
        raise WrongAnswerError(f"workload {self._workload.name}, {self._way}: the answer to request {number} {how}")


@dataclass(slots=True)
class Measurement:
    """What was counted: the latency of each reply in seconds, their tokens, and the CPU time used meanwhile; and how
    often the server refused with which words.

    CPU times are in seconds: of the load generator, of the server, and of everything else on the machine.
    """

    latencies: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    client_cpu: float = 0.0
    server_cpu: float = 0.0
    other_cpu: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    def count(self, reply: Reply, latency: float, tokens: int) -> None:
        """Counts a reply, as an answer or a refusal."""
        if isinstance(reply, Refused):
            self.refused[reply.how] += 1
        else:
            self.latencies.append(latency)
            self.tokens += tokens


class Clock:
    """Counts replies from the end of the warm-up until the time is over.

    The warm-up begins with the first reply: encoding large requests and connecting can take longer than all of it.
    `server_cpu` reads the CPU time that the server has used, in seconds.
    """

    def __init__(self, workload: Workload, seconds: float, server_cpu: Callable[[], float]) -> None:
        self.measurement = Measurement()
        self._lengths = workload.lengths
        self._clocks = Clocks(server_cpu)
        self._begin = math.inf
        self._seconds = seconds
        self._counting = self._over = False

    def replied(self, number: int, sent_at: float, reply: Reply) -> bool:
        """Counts a reply, and returns whether time is left."""
        now = perf_counter()
        if self._counting:
            measurement = self.measurement
            measurement.count(reply, now - sent_at, self._lengths[number])
            if now >= self._begin + self._seconds:
                self._counting, self._over = False, True
                measurement.seconds = now - self._begin
                self._clocks.stop(measurement)
        elif self._begin == math.inf:
            self._begin = now + self._seconds * WARM_UP
        elif not self._over and now >= self._begin:
            self._counting, self._begin = True, now
            self._clocks.start()
        return not self._over


class OpenClock:
    """Counts the requests of an open loop that are due after the warm-up, until all of them are answered.

    So none is left out for being late.
    """

    def __init__(self, workload: Workload, arrivals: OpenLoop, warm_up: float, server_cpu: Callable[[], float]) -> None:
        self.measurement = Measurement()
        self._lengths, self._arrivals = workload.lengths, arrivals
        self._warm_up = warm_up
        self._missing = sum(time >= warm_up for time in arrivals.times)
        self._clocks = Clocks(server_cpu)
        self._counting = False

    def replied(self, number: int, sent_at: float, reply: Reply) -> bool:
        """Counts a reply, and returns whether more are to come."""
        now = perf_counter()
        begin = self._arrivals.begun + self._warm_up
        if not self._counting and now >= begin:
            self._counting = True
            self._clocks.start()
        if sent_at < begin or not self._missing:
            return self._missing > 0
        measurement = self.measurement
        measurement.count(reply, now - sent_at, self._lengths[number])
        self._missing -= 1
        if not self._missing:
            measurement.seconds = now - begin
            self._clocks.stop(measurement)
        return self._missing > 0


class Clocks:
    """The CPU time of this process, of the server and of the machine, between a start and a stop."""

    def __init__(self, server_cpu: Callable[[], float]) -> None:
        self._server_cpu = server_cpu
        self._since = (0.0, 0.0, 0.0)

    def start(self) -> None:
        """Starts the clocks."""
        self._since = self._read()

    def stop(self, measurement: Measurement) -> None:
        """Stops the clocks, and adds the times to a measurement."""
        client, server, machine = (after - before for before, after in zip(self._since, self._read(), strict=True))
        measurement.client_cpu, measurement.server_cpu = client, server
        # The clocks tick in hundredths of a second, not all at the same moment.
        measurement.other_cpu = max(0.0, machine - client - server)

    def _read(self) -> tuple[float, float, float]:
        machine = psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # On Linux, guest time is included in user time.
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return process_time(), self._server_cpu(), sum(machine) - idle - guests
