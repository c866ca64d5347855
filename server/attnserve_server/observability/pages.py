"""Renders the pages of `/metrics`: in the long run two a second, however many are asked for.

In: requests for a page, each in a format. Out: the page, rendered after the request came. Whoever reaches the HTTP port
may ask, and a page takes milliseconds of the event loop. So one page is rendered at a time, for all who wait for its
format; and once the pages that were saved up are used up, requests wait until it is time for the next page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry

EVERY_S: Final = 0.5
"""The time between two pages in the long run, in seconds."""
SAVED: Final = 60
"""How many pages may be rendered one right after the other, if few were lately: tools ask a few times in a row, or
until something changes. So many take some tenths of a second of the event loop.
"""

Encode: TypeAlias = Callable[[CollectorRegistry], bytes]
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
        self._next: asyncio.TimerHandle | None = None
        self._spent_until = 0.0
        """When all pages so far would have been rendered if each had taken its `EVERY_S`."""

    async def page(self, content_type: str, encode: Encode) -> bytes | None:
        """A page, rendered from now on; None if the metrics could not be read, which is logged."""
        form = Format.of(content_type)
        if form not in self._wanted:
            self._wanted[form] = (encode, asyncio.get_running_loop().create_future())
            if self._next is None:
                self._plan()
        return await asyncio.shield(self._wanted[form][1])  # which others may wait for

    def close(self) -> None:
        """Renders nothing any more."""
        if self._next is not None:
            self._next.cancel()

    def _plan(self) -> None:
        wait = self._spent_until - (SAVED - 1) * EVERY_S - monotonic()
        self._next = asyncio.get_running_loop().call_later(max(0.0, wait), self._render)

    def _render(self) -> None:
        encode, rendered = self._wanted.pop(next(iter(self._wanted)))
        self._next = None
        self._spent_until = max(self._spent_until, monotonic()) + EVERY_S
        page = None
        try:
            page = encode(self._registry)
        except Exception:  # reading a gauge may fail in ways particular to its device
            logger.exception("the metrics could not be read")
        rendered.set_result(page)
        if self._wanted:
            self._plan()
