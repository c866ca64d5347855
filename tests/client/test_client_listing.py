"""Lists of caches that a server gives page by page."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from cache_keeper import PAGE, Keeper
from cached import D, H, address, client, keeper, transport
from calls import PATIENCE_S

from attnserve import DeadlineExceededError, ProtocolError

__all__ = ["address", "client", "keeper", "transport"]


@pytest.mark.parametrize("count", [0, PAGE, PAGE + 1, 3 * PAGE])
def test_all_pages_are_one_list(client: Any, keeper: Keeper, count: int) -> None:
    names = [client.create_cache(H, D).name for _ in range(count)]
    keeper.asked.clear()
    pool = client.caches.pool()
    assert [info.name for info in pool.caches] == names
    assert (pool.bytes, pool.free_bytes) == (1 << 20, 1000), "of one server, however many pages"
    assert keeper.methods() == ["List"] * max(1, -(-count // PAGE))


def test_a_page_that_follows_itself_ends_the_list(client: Any, keeper: Keeper) -> None:
    def same(answer: Any, context: Any) -> None:
        answer.next_page_token = "7"

    keeper.after["List"] = same
    with pytest.raises(ProtocolError, match="next_page_token"):
        client.caches.list()
    assert keeper.methods() == ["List"] * 2


def test_the_timeout_is_that_of_all_pages_together(client: Any, keeper: Keeper) -> None:
    """A server whose pages never end is given up."""
    released = threading.Event()

    def another(answer: Any, context: Any) -> None:
        answer.next_page_token = str(len(keeper.asked))
        released.wait(0.05)

    keeper.after["List"] = another
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"within 0\.5 s"):
        client.caches.list(timeout=0.5)
    assert time.monotonic() - begin < PATIENCE_S
    assert len(keeper.asked) > 1
