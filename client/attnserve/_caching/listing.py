"""The list of the caller's caches on one server, page by page.

In: the pages that the server has replied with. Out: the request for the next one, and how long that may take. No I/O.
"""

from __future__ import annotations

import time
from math import inf
from typing import Final

from attnserve._errors import ProtocolError
from attnserve._requests import cache_requests
from attnserve._requests.cache_requests import CachePool, Page
from attnserve._rpc import Rpc
from attnserve.v1 import caches_pb2 as pb


class Listing:
    """A list that is being asked for."""

    def __init__(self, timeout: float | None) -> None:
        """It may take `timeout` seconds in all; None for no limit."""
        self.timeout: Final = timeout
        self._end: Final = inf if timeout is None else time.monotonic() + timeout
        self._token = ""
        self.pages: Final[list[CachePool]] = []
        """What there is so far."""
        self.is_complete = False

    @property
    def rpc(self) -> Rpc[pb.CacheServiceListResponse, Page]:
        """The request for the next page."""
        return cache_requests.page(self._token)

    @property
    def left(self) -> float | None:
        """How many seconds that may take; None for no limit."""
        return None if self._end == inf else max(0.0, self._end - time.monotonic())

    def add(self, page: Page) -> None:
        """Adds the next page. ProtocolError if it would be followed by itself."""
        if page.token and page.token == self._token:
            raise ProtocolError("next_page_token: expected that of another page, the server replied with this one's")
        self.pages.append(page.pool)
        self._token, self.is_complete = page.token, not page.token
