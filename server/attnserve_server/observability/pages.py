"""Renders the pages of `/metrics`: in the long run two a second, however many are asked for.

In: requests for a page, each in a format. Out: the page, rendered after the request came. Whoever reaches the HTTP port
may ask, and a page takes tens of milliseconds of the event loop. So one page is rendered at a time, for all who wait
for its format; and once the pages that were saved up are used up, requests wait until it is time for the next page.

A page is rendered in pieces, and after about `SLICE_SECONDS` the loop turns for others before there are more. So its
metrics are not all of one moment, as they never are of several servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from copy import copy
from time import monotonic, perf_counter
from typing import Final, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from attnserve_server.host.loop_slices import SLICE_SECONDS

EVERY_S: Final = 0.5
"""The time between two pages in the long run, in seconds."""
SAVED: Final = 60
"""How many pages may be rendered one right after the other, if few were lately: tools ask a few times in a row, or
until something changes.
"""
TURNS: Final = 10
"""How often the loop turns for others after each slice of a page: about as often as a unary call needs."""
PATIENCE_S: Final = 1.0
"""How long the loop turns for others while a page is rendered. Where turns take long, the rest then comes without
pauses, since whoever asked waits for some seconds only.
"""
PIECE: Final = 50
"""The most samples that are encoded at once: a metric with labels may have hundreds."""

Encode: TypeAlias = Callable[[Collector], bytes]
logger = logging.getLogger(__name__)


class Format(NamedTuple):
    """What makes pages differ, whatever else a request's `Accept` says: six in all."""

    openmetrics: bool
    escaping: str
    """How names are escaped, if not as they are by default: `dots` or `values`. Other ways leave these names alone."""

    @classmethod
    def of(cls, content_type: str) -> Format:
        """The format of a content type that `choose_encoder` gives."""
        escaping = content_type.rpartition("escaping=")[2]
        openmetrics = content_type.startswith("application/openmetrics-text")
        return cls(openmetrics, escaping if escaping in ("dots", "values") else "")


class Pages:
    """The pages of one registry. To be used on one event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._wanted: dict[Format, tuple[Encode, asyncio.Future[bytes | None]]] = {}
        self._renders: asyncio.Task[None] | None = None
        """Renders all pages that are wanted, if any are."""
        self._spent_until = 0.0
        """When all pages so far would have been rendered if each had taken its `EVERY_S`."""

    async def page(self, content_type: str, encode: Encode) -> bytes | None:
        """A page, rendered from now on; None if the metrics could not be read, which is logged."""
        form = Format.of(content_type)
        if form not in self._wanted:
            self._wanted[form] = (encode, asyncio.get_running_loop().create_future())
            if self._renders is None:
                self._renders = asyncio.create_task(self._render_all())
        return await asyncio.shield(self._wanted[form][1])  # which others may wait for

    def close(self) -> None:
        """Renders nothing any more."""
        if self._renders is not None:
            self._renders.cancel()

    async def _render_all(self) -> None:
        while self._wanted:
            await asyncio.sleep(self._spent_until - (SAVED - 1) * EVERY_S - monotonic())
            encode, rendered = self._wanted.pop(next(iter(self._wanted)))
            self._spent_until = max(self._spent_until, monotonic()) + EVERY_S
            page = None
            try:
                page = await _rendered(self._registry, encode)
            except Exception:  # reading a gauge may fail in ways particular to its device
                logger.exception("the metrics could not be read")
            rendered.set_result(page)
        self._renders = None


class _Piece(Collector):
    """One metric, or some samples of it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> tuple[Metric]:
        """That metric."""
        return (self._metric,)


async def _rendered(registry: Collector, encode: Encode) -> bytes:
    """A page of a registry, as `encode` would make it, while the loop turns in between."""
    end = encode(CollectorRegistry())
    page = bytearray()
    begin = turned = perf_counter()
    for metric in registry.collect():
        for piece in _encoded(metric, encode, end):
            page += piece
            now = perf_counter()
            if now - turned >= SLICE_SECONDS and now - begin < PATIENCE_S:
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                turned = perf_counter()
    return bytes(page) + end


def _encoded(metric: Metric, encode: Encode, end: bytes) -> Iterator[bytes]:
    """A metric as `encode` makes it, in pieces, without the end of the page. (In text, times of creation would come
    behind all other samples; no metric of a server has any.)
    """
    samples, head = metric.samples, b""
    for first in range(0, max(1, len(samples)), PIECE):
        piece = copy(metric)
        piece.samples = samples[first : first + PIECE]
        yield encode(_Piece(piece)).removesuffix(end).removeprefix(head)
        if not first and len(samples) > PIECE:
            piece.samples = []
            head = encode(_Piece(piece)).removesuffix(end)
