"""What holds a cache, and what lets go of it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from stores import store_of

from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.work import CacheHost, CacheWork, Use
from attnserve_server.errors import RequestError


def test_one_who_may_not_enter_holds_nothing() -> None:
    host = CacheHost(store_of(256, 10, page_bytes=4096), cast(Any, None), "")
    first, second = (host.store.create(CacheShape(1, 8, 8, 1, "float32"), None, 0.0) for _ in range(2))
    host.store.delete(second)
    work = CacheWork(host, (Use(first, 0, 3, None), Use(second, 0, 3, None)), 0)
    with pytest.raises(RequestError):
        work.enter()
    assert (first.users, host.store.reserved_pages) == (0, 0)
