"""Questions about a server itself, which it answers even while it starts or drains: what they leave as it is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from askers import arrays

from attnserve import AsyncClient, Client, ClientClosedError
from attnserve._servers.replicas import Replica
from attnserve._settings.retry import RetryPolicy

if TYPE_CHECKING:
    from tests.conftest import Server


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is noted of answers: that the server works, and that a refused call may be sent again."""
    notes: list[str] = []
    worked, answered = Replica.worked, RetryPolicy.answered

    def note_work(self: Replica, now: float, begin: float) -> None:
        notes.append("worked")
        worked(self, now, begin)

    def note_answer(self: RetryPolicy, calls: int, now: float) -> None:
        notes.append("answered")
        answered(self, calls, now)

    monkeypatch.setattr(Replica, "worked", note_work)
    monkeypatch.setattr(RetryPolicy, "answered", note_answer)
    return notes


async def test_they_do_not_decide_where_calls_go(server: Server, noted: list[str]) -> None:
    """A server that answers them may still take no calls: one that has failed does not count as well because of them,
    and the more often somebody asks, the more retries at full servers would be allowed.
    """
    with Client(server.address) as client:
        assert (client.is_ready(), client.is_alive(), bool(client.server_info())) == (True, True, True)
        assert noted == []
        client.layers.list()
        assert noted == ["worked", "answered"]
        noted.clear()
    async with AsyncClient(server.address) as in_tasks_too:
        assert (await in_tasks_too.is_ready(), await in_tasks_too.is_alive()) == (True, True)
        assert noted == []
        await in_tasks_too.caches.list()
        assert noted == ["worked", "answered"]


def test_one_that_begins_while_the_client_is_closed_opens_no_connection(server: Server) -> None:
    """Nothing would ever close it. The call has found its server when another thread closes the client."""
    client = Client([server.address])
    client.attend(*arrays())
    connection = client._calls.servers.connection()
    found, closed = threading.Event(), threading.Event()
    connect = client._calls.servers.connection

    def slowly(*arguments: Any) -> Any:
        try:
            return connect(*arguments)
        finally:
            found.set()
            assert closed.wait(30)

    client._calls.servers.connection = slowly  # type: ignore[method-assign]
    outcome: list[BaseException] = []

    def ask() -> None:
        try:
            client.is_ready()
        except ClientClosedError as error:
            outcome.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert found.wait(30)
    client.close()
    closed.set()
    asking.join()
    assert len(outcome) == 1
    assert connection._anyhow is None
