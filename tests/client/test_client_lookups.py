"""Names of servers: looked up when a client is first used, in vain, slowly, or by a function that is broken."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import TYPE_CHECKING, Any

import calls
import pytest
from askers import Transport, arrays, transport

from attnserve import AsyncClient, Client, ClientClosedError, DeadlineExceededError, UnavailableError

if TYPE_CHECKING:
    from tests.conftest import Server

__all__ = ["transport"]


async def test_a_name_that_is_not_looked_up_in_time(server: Server, transport: Transport) -> None:
    """Calls end at their timeouts, however long the lookup takes; those made once it is done are answered."""
    known = threading.Event()

    def slow() -> list[str]:
        assert known.wait(calls.PATIENCE_S)
        return [server.address]

    with Client(slow, transport=transport) as client:
        asks: list[Callable[[], object]] = [
            lambda: client.attend(*arrays(), timeout=0.05),
            lambda: client.server_info(timeout=0.05),
            lambda: client.create_cache(2, 8, timeout=0.05),
            lambda: client.caches.list(timeout=0.05),
        ]
        for ask in asks:
            with pytest.raises(DeadlineExceededError):
                ask()
        known.set()
        client.attend(*arrays())
    known.clear()
    async with AsyncClient(slow, transport=transport, timeout=0.05) as in_tasks_too:
        with pytest.raises(DeadlineExceededError):
            await in_tasks_too.attend(*arrays())
        with pytest.raises(DeadlineExceededError):
            await in_tasks_too.create_cache(2, 8, timeout=0.05)
        known.set()
        await in_tasks_too.attend(*arrays(), timeout=calls.PATIENCE_S)


class Resolver:
    """Looks up the address of a server; the first look-ups fail as those of a name that is not known yet do."""

    def __init__(self, address: str, failures: float) -> None:
        self.looks = 0
        self._address = address
        self._failures = failures

    def __call__(self) -> list[str]:
        self.looks += 1
        if self.looks <= self._failures:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [self._address]


async def test_a_name_that_is_not_known_yet(server: Server, transport: Transport) -> None:
    """It is looked up as often as a call is sent to a server that is unavailable, whatever the call."""
    asks: list[Callable[[Any], Any]] = [
        lambda client: client.attend(*arrays()),
        lambda client: client.server_info(),
        lambda client: client.create_cache(2, 8),
        lambda client: client.caches.list(),
        lambda client: asyncio.gather(*(client.submit(*arrays()) for _ in range(3))),
    ]
    for ask in asks[:-1]:
        with Client(Resolver(server.address, 3), transport=transport) as client:
            ask(client)

    async def ask_in_tasks(ask: Callable[[Any], Any]) -> None:
        client = AsyncClient(Resolver(server.address, 3), transport=transport)
        try:
            await ask(client)
        finally:
            await client.close()

    await asyncio.gather(*map(ask_in_tasks, asks))


async def test_each_caller_gets_an_error_of_its_own(transport: Transport) -> None:
    """An exception that several raise would show each of them the others' frames, and keep what is in these."""
    count = 8
    all_wait = threading.Event()

    def fail_for_all() -> list[str]:
        assert all_wait.wait(calls.PATIENCE_S)
        raise OSError("there is no directory of servers")

    options: dict[str, Any] = {"transport": transport, "retries": 0, "timeout": calls.PATIENCE_S}
    with Client(fail_for_all, **options) as client, ThreadPoolExecutor(count) as threads:
        asking = [threads.submit(client.attend, *arrays()) for _ in range(count)]
        all_wait.set()
        errors = [each.exception(calls.PATIENCE_S) for each in asking]
    all_wait.clear()
    in_tasks = AsyncClient(fail_for_all, **options)  # `async with` would look up before there are calls
    asked = [asyncio.ensure_future(in_tasks.attend(*arrays())) for _ in range(count)]
    await asyncio.sleep(0)
    all_wait.set()
    errors += await asyncio.gather(*asked, return_exceptions=True)
    await in_tasks.close()
    assert {type(error) for error in errors} == {UnavailableError}
    assert len(set(map(id, errors))) == 2 * count
    assert {type(error.__cause__) for error in errors if error is not None} == {OSError}


async def test_a_name_that_nobody_knows() -> None:
    for retries in (0, 1):
        unknown = Resolver("", inf)
        with Client(unknown, retries=retries) as client, pytest.raises(UnavailableError, match="service not known"):
            client.attend(*arrays())
        assert unknown.looks == 1 + retries
    # Calls that have no time for all of the retries say what has failed so far, and why.
    with Client(Resolver("", inf), retries=100) as client:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="service not known") as raised:
                client.server_info(timeout=0.5)
            assert isinstance(raised.value.__cause__, socket.gaierror)
    async with AsyncClient(Resolver("", inf), retries=100, timeout=0.5) as in_tasks_too:
        with pytest.raises(UnavailableError, match="service not known") as raised:
            await in_tasks_too.attend(*arrays())
        assert isinstance(raised.value.__cause__, socket.gaierror)


async def test_the_loop_goes_on_while_a_name_is_looked_up(server: Server, transport: Transport) -> None:
    """Also for a client used without `async with`: whatever its first call, the lookup only ends if the loop runs."""
    looking, known = threading.Event(), threading.Event()

    def slow() -> list[str]:
        looking.set()
        assert known.wait(2 * calls.PATIENCE_S)
        return [server.address]

    asks: list[Callable[[AsyncClient], Awaitable[object]]] = [
        lambda client: client.attend(*arrays()),
        lambda client: client.server_info(),
        lambda client: client.create_cache(2, 8),
        lambda client: client.caches.list(),
        lambda client: asyncio.gather(*(client.submit(*arrays()) for _ in range(3))),
    ]
    for ask in asks:
        looking.clear()
        known.clear()
        client = AsyncClient(slow, transport=transport, timeout=calls.PATIENCE_S)
        asked = asyncio.ensure_future(ask(client))
        try:
            assert await asyncio.to_thread(looking.wait, calls.PATIENCE_S)
            given_up = client.submit(*arrays())
            assert given_up.cancel()
            known.set()
            await asked
            assert given_up.cancelled()
        finally:
            known.set()
            await client.close()


async def test_closing_ends_the_wait_of_tasks_for_a_name() -> None:
    over = threading.Event()

    def endless() -> list[str]:
        over.wait()
        return []

    client = AsyncClient(endless)
    try:
        waiting = [client.submit(*arrays(), timeout=None), asyncio.ensure_future(client.server_info(timeout=None))]
        await asyncio.sleep(0)
        await client.close()
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, ClientClosedError)
    finally:
        over.set()


def test_closing_ends_the_wait_for_a_name() -> None:
    """Calls without a timeout that wait for the lookup fail at once, however long it takes."""
    looking, over = threading.Event(), threading.Event()

    def endless() -> list[str]:
        looking.set()
        over.wait()
        return []

    client = Client(endless)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.attend, *arrays(), timeout=None)
        try:
            assert looking.wait(calls.PATIENCE_S)
            client.close()
            assert isinstance(waiting.exception(calls.PATIENCE_S), ClientClosedError)
        finally:
            over.set()


class Broken:
    """A function that looks nothing up but raises."""

    def __init__(self, error: BaseException) -> None:
        self.looks = 0
        self._error = error

    def __call__(self) -> list[str]:
        self.looks += 1
        raise self._error


@pytest.mark.parametrize("error", [ValueError("no number"), TypeError("a bug"), KeyError("pods"), NameError("lost")])
async def test_a_function_that_is_broken_is_not_called_again(transport: Transport, error: Exception) -> None:
    """The call fails at once and says what the function raised; the next call tries again."""
    broken = Broken(error)
    with Client(broken, transport=transport, retries=100) as client:
        for looks in (1, 2):
            with pytest.raises(UnavailableError, match="the function that looks it up raised") as raised:
                client.attend(*arrays())
            assert repr(error) in str(raised.value)
            assert raised.value.__cause__ is error
            assert broken.looks == looks
    async with AsyncClient(broken, transport=transport, retries=100) as in_tasks_too:
        with pytest.raises(UnavailableError, match="the function that looks it up raised"):
            await in_tasks_too.attend(*arrays())
    assert broken.looks == 4, "by `async with`, and by the call"


@pytest.mark.parametrize("found", [None, [1], ["no address"], [b"127.0.0.1:1"]])
def test_neither_is_one_that_returns_no_addresses(found: Any) -> None:
    looks: list[object] = []

    def function() -> Any:
        looks.append(found)
        return found

    with (
        Client(function, retries=100) as client,
        pytest.raises(UnavailableError, match=r"function: the function .* raised"),
    ):
        client.attend(*arrays())
    assert len(looks) == 1


class Unlisted(Exception):
    """What a library raises that is out of reach of its API."""


@pytest.mark.parametrize("error", [Unlisted("503"), ssl.SSLCertVerificationError("expired"), SystemExit(1)])
def test_what_may_pass_is_tried_again(error: BaseException) -> None:
    broken = Broken(error)
    with Client(broken, retries=2) as client, pytest.raises(UnavailableError):
        client.attend(*arrays(), timeout=None)
    assert broken.looks == 3


def looking() -> list[str]:
    """The threads that look up names."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("attnserve-resolve")]


def test_no_thread_looks_for_the_servers_of_a_closed_client() -> None:
    calls.until(lambda: not looking(), "earlier threads end")
    client = Client(Resolver("", inf), retries=100)
    with pytest.raises(UnavailableError):
        client.attend(*arrays(), timeout=0.5)
    assert looking()
    client.close()
    calls.until(lambda: not looking(), "the thread ends")


def test_whatever_a_later_look_up_raises_it_is_repeated(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """And until one succeeds, the servers that are known stay in use."""
    looks = itertools.count()
    again = threading.Event()

    def function() -> list[str]:
        look = next(looks)
        if look == 1:
            raise RuntimeError("for once")
        if look > 1:
            again.set()
        return [server.address]

    with Client(function, refresh=0.01) as client:
        for _ in range(2):
            client.attend(*arrays())
            assert again.wait(calls.PATIENCE_S)
    assert "the servers could not be looked up: RuntimeError('for once')" in caplog.text


def test_no_thread_looks_for_the_servers_that_a_closed_client_has_known(server: Server) -> None:
    """However long it would have been until the next look-up."""
    calls.until(lambda: not looking(), "earlier threads end")
    with Client(lambda: [server.address], refresh=1e6) as client:
        client.attend(*arrays())
        assert looking()
    calls.until(lambda: not looking(), "the thread ends")


def test_no_thread_looks_for_the_servers_of_a_loop_that_has_ended(server: Server) -> None:
    """Even if the client was not closed there, as it should have been."""
    calls.until(lambda: not looking(), "earlier threads end")

    async def run() -> AsyncClient:
        client = AsyncClient(lambda: [server.address], refresh=0.01)
        await client.attend(*arrays())
        return client

    client = asyncio.run(run())
    calls.until(lambda: not looking(), "the thread ends")
    del client


def test_a_look_up_that_fails_after_its_call_has_ended_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for its outcome any more."""
    over = threading.Event()

    def slow() -> list[str]:
        assert over.wait(calls.PATIENCE_S)
        raise ValueError("a bug")

    async def run() -> None:
        client = AsyncClient(slow)
        given_up = asyncio.ensure_future(client.server_info())
        with pytest.raises(DeadlineExceededError):
            await client.attend(*arrays(), timeout=0.05)
        given_up.cancel()
        over.set()
        await asyncio.to_thread(calls.until, lambda: not looking(), "the look-up fails")
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await given_up

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(run())
        gc.collect()
    assert caplog.records == []
