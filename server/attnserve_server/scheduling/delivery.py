"""Delivers the outcomes of requests to their callers, and reports them to metrics and traces.

In: entries that were computed together, and their results or error; or one entry and the error that it ends with. Out:
calls of the entries' `reply`. If a reply fails, that concerns its caller alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attnserve_server.errors import ComputationFailed, RequestError
from attnserve_server.requests.work import BatchResult, Phases
from attnserve_server.scheduling.entry import Entry, Outcome

if TYPE_CHECKING:
    from attnserve_server.observability.metrics import Metrics
    from attnserve_server.observability.tracing import Tracing

logger = logging.getLogger(__name__)


class Delivery:
    """Delivers the outcomes of one engine."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None) -> None:
        self._metrics = metrics
        self._tracing = tracing

    def deliver(self, entries: list[Entry], begin: float, outcome: BatchResult | RequestError) -> None:
        """Answers entries that were computed, or failed, together from `begin` on; there are none if all run again."""
        if not entries:
            if isinstance(outcome, BatchResult):
                self._metrics.kernels(outcome.kernel_calls)
            return
        computes = entries[0].request.computes  # the same for all: they are of one group
        if self._tracing is not None and computes:
            self._tracing.batch(entries, begin, outcome)
        if isinstance(outcome, RequestError):
            for entry in entries:
                self.reply(entry, outcome)
            return
        flops = sum(entry.request.extent.flops for entry in entries)
        tokens = sum(entry.request.extent.query_tokens for entry in entries)
        if computes:
            self._metrics.batch(len(entries), flops, tokens, outcome.padding, outcome.kernel_calls)
        if (layer := entries[0].request.layer) is not None:
            self._metrics.layer_batch(layer, len(entries), tokens, flops)
        for entry, result in zip(entries, outcome.results, strict=True):
            queue = max(0.0, begin - entry.arrival - entry.decode)
            phases = Phases(entry.decode, queue, outcome.staging, outcome.compute, outcome.fetch)
            self.reply(entry, Outcome(result, phases, len(entries)))

    def reply(self, entry: Entry, outcome: Outcome | RequestError) -> None:
        """Answers an entry."""
        entry.answered = True
        try:
            entry.reply(entry, outcome)
        except Exception:
            logger.exception("a reply failed")
            if isinstance(outcome, Outcome):
                self.reply(entry, ComputationFailed("the reply could not be encoded"))
