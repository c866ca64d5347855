"""How calls end, told to all who keep account of it: metrics, usage of callers, traces and the log.

In: a call's label, when it came, and the status that it ends with. Out: nothing; the caller is told by whoever has the
call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING

from attnserve_server.errors import ComputationFailed
from attnserve_server.observability.refusals import Refusals

if TYPE_CHECKING:
    from attnserve_server.access.callers import Caller
    from attnserve_server.errors import RequestError
    from attnserve_server.no_room import NoRoom
    from attnserve_server.observability.metrics import Metrics, Operation
    from attnserve_server.observability.tracing import Trace


class Endings:
    """The endings of one server's calls. Lives on the event loop."""

    def __init__(self, metrics: Metrics, refusals: Refusals) -> None:
        self._metrics = metrics
        self._refusals = refusals

    def ended(self, label: Operation, code: str, arrival: float, trace: Trace | None = None, requests: int = 1) -> None:
        """A call that came at `arrival` (seconds of `time.perf_counter`) ends with a gRPC status code; or several that
        came together. `label` is its operation's name in the metrics. A trace is finished if it is given.
        """
        now = perf_counter()
        self._metrics.finished(label, code, now - arrival, requests)
        if trace is not None:
            trace.finish(code, now)

    def refused(
        self, label: str, error: RequestError | NoRoom, caller: Caller | None, request_id: Callable[[], str]
    ) -> None:
        """An error answers a call or ends an RPC. It is counted if it is a rejection, also for its caller if that is
        known; and it is logged. `request_id` is called only if a line is written, or if the caller is told the id,
        which then is in the error.
        """
        if error.rejection is not None:
            self._metrics.rejected(error.rejection)
            if caller is not None:
                self._metrics.usage.of(caller.name).rejected += 1
        elif isinstance(error, ComputationFailed):
            request_id = cache(request_id)  # the id in the error is that in the log
            error.request_id = request_id()
        self._refusals.note(label, error, request_id, None if caller is None else caller.name)
