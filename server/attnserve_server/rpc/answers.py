"""The answer to a call, by whichever RPC that came: it is encoded and accounted for. If nobody waits for it any longer,
it is only accounted for.

In: an entry and its outcome. Out: what the RPC sends of it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from attnserve._fields import Buffer
from attnserve_server.errors import RequestError
from attnserve_server.observability.metrics import Metrics
from attnserve_server.observability.usage import Usage
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry, Outcome

T = TypeVar("T")


def encoded(
    entry: Entry, outcome: Outcome, metrics: Metrics, usage: Usage, put_together: Callable[[list[Buffer], int], T]
) -> T:
    """The reply, as `put_together` makes it of its pieces and their total length. Counts the phases of the request,
    ends its trace, and adds to its caller's usage.
    """
    begin, phases = perf_counter(), outcome.phases
    reply = put_together(*entry.request.encode(outcome.result, phases, outcome.batch_size))
    end = perf_counter()
    encode = phases.encode + end - begin
    metrics.phases((phases.decode, phases.queue, phases.staging, phases.compute, encode))
    if entry.trace is not None:
        entry.trace.finish("OK", end, phases._replace(encode=encode), outcome.batch_size)
    _take_note(entry, usage)
    return reply


def unwanted(entry: Entry, outcome: Outcome | RequestError, engine: Engine, usage: Usage) -> None:
    """Lets go of a request whose caller has gone. What was computed for it is on its caller's account all the same."""
    if isinstance(outcome, Outcome):
        _take_note(entry, usage)
    engine.release(entry)


def _take_note(entry: Entry, usage: Usage) -> None:
    """Adds what was computed to its caller's account."""
    usage.computed(entry.request.extent.query_tokens, entry.request.extent.flops, entry.device_seconds)
