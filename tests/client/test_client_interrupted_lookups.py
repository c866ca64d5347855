"""What a signal's handler raises as the main thread looks up servers: others find them, and a client can be closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from calls import PATIENCE_S
from interrupting import handled, interrupted_at, places

from attnserve import Client, DeadlineExceededError

__all__ = ["handled"]

pytestmark = pytest.mark.usefixtures("handled")


def ends(operation: Callable[[], object]) -> bool:
    """Whether an operation ends, in a thread of its own."""
    thread = threading.Thread(target=operation, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def look_up_interrupted_at(place: int, timeout: float) -> bool:
    """Interrupts a first look-up in that place, and has others find the servers. Returns whether there is the place."""
    known = threading.Event()
    if timeout == PATIENCE_S:
        known.set()

    def look_up() -> list[str]:
        assert known.wait(PATIENCE_S)
        return ["127.0.0.1:1", "127.0.0.1:2"]

    client = Client(look_up)
    servers = client._calls.servers

    def resolve() -> None:
        with suppress(DeadlineExceededError):
            servers.resolve(timeout)

    is_there = interrupted_at(place, resolve)
    known.set()
    assert ends(lambda: servers.resolve(PATIENCE_S)), f"interrupted in place {place}"
    assert servers.resolved
    assert ends(client.close), f"interrupted in place {place}"
    return is_there


@pytest.mark.parametrize("timeout", [1e-6, PATIENCE_S], ids=["in vain", "found"])
def test_wherever_it_comes_as_they_are_looked_up_others_find_them(timeout: float) -> None:
    assert places(lambda place: look_up_interrupted_at(place, timeout)) > 10


def look_again_interrupted_at(place: int) -> bool:
    """The same as another look-up is asked for, as when a server has failed."""
    client = Client(lambda: ["127.0.0.1:1", "127.0.0.1:2"], refresh=1e6)
    client._calls.servers.resolve(PATIENCE_S)
    ask = client._calls.servers._replicas.look_up
    is_there = interrupted_at(place, lambda: ask())
    assert ends(ask), f"interrupted in place {place}"
    assert ends(client.close), f"interrupted in place {place}"
    return is_there


def test_wherever_it_comes_as_another_look_is_asked_for_others_can_ask() -> None:
    assert places(look_again_interrupted_at) > 3


def close_interrupted_at(place: int) -> bool:
    """The same as they are given up, while another thread waits for them."""
    known = threading.Event()

    def look_up() -> list[str]:
        assert known.wait(PATIENCE_S)
        raise OSError("out of reach")

    client = Client(look_up)
    servers = client._calls.servers
    servers.resolving()
    is_there = interrupted_at(place, servers.close)
    known.set()  # the look-up is about to wait for its next attempt, unless it is over
    assert ends(servers.close), f"interrupted in place {place}"
    assert ends(lambda: servers._ended.wait(0)), f"interrupted in place {place}"
    client.close()
    return is_there


def test_wherever_it_comes_as_a_client_is_closed_its_look_up_ends() -> None:
    assert places(close_interrupted_at) > 3
