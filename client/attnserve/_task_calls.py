"""How an asyncio client makes its calls: over which transport, to which server, in which order, under which span.

In: encoded calls, plain RPCs, and the plans of operations on caches. Out: futures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attnserve._caching.creation import Making
from attnserve._caching.plans import Plan, Request
from attnserve._caching.transaction import Transaction
from attnserve._caching.turns import Turns
from attnserve._errors import ClientClosedError, DeadlineExceededError, OverloadedError, UnavailableError
from attnserve._process import Process
from attnserve._requests.cache_requests import CacheInfo
from attnserve._requests.call import EncodedCall
from attnserve._rpc import Rpc
from attnserve._servers.replicas import Replica
from attnserve._servers.task_servers import TaskServers
from attnserve._settings.config import LAST_WORDS_SECONDS, TELLING_SECONDS, Settings, Timeout, checked_timeout
from attnserve._settings.credentials import Bearer, Identity
from attnserve._settings.retry import Again
from attnserve._tracing import Tracing
from attnserve._transports.connection import others_of
from attnserve._transports.outcome import Beginning
from attnserve._transports.task_connection import Connection
from attnserve._transports.tasks import CallFuture, later, unended
from attnserve._transports.unary import UnaryCall
from attnserve._transports.unary_tasks import UnaryTransport

if TYPE_CHECKING:
    from opentelemetry.context import Context

T = TypeVar("T")


class Calls:
    """A client's calls in flight, and the servers that it knows. It belongs to the loop in which it is first used."""

    def __init__(self, settings: Settings, tracing: Tracing | None) -> None:
        self._settings = settings
        self._identity, self._bearer = Identity(settings.tls), Bearer(settings.token)
        self._tracing = tracing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = Process()
        self.servers: Final = TaskServers(
            self._process,
            settings.target,
            settings.refresh,
            settings.policy,
            self._connect,
            self._dispose,
            self._in_loop,
            outdated=None if settings.tls is None else self._identity.changed,
        )
        """The servers of the client."""
        self.turns: Final = Turns(later)
        """The order of operations on caches."""
        self._unary = UnaryTransport(self._bearer)
        self._looking: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Future[Any]] = set()
        self._end: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def look(self) -> None:
        """Looks up the servers, if needed. An error is left for the first call to raise."""
        if self.servers.is_unresolved:
            with suppress(UnavailableError, DeadlineExceededError):
                await self.servers.resolve_soon(self._settings.timeout)

    async def close(self) -> None:
        """Ends the connections, unless another process opened them. Calls in flight fail with `ClientClosedError`. Once
        begun, closing completes even if the caller is cancelled; if all tasks of the loop were cancelled, the next call
        completes it. RuntimeError in another loop while that of the connections lives; once that is closed, what is
        left in it is dropped.
        """
        if self._process.is_another:
            return
        loop = asyncio.get_running_loop()
        if self._loop is not None and not self._loop.is_closed():
            self._check_loop(loop)
        if self._end is None or self._end.cancelled() or self._end.get_loop().is_closed():
            self._end = loop.create_task(self._close())
        await asyncio.shield(self._end)

    async def _close(self) -> None:
        if telling := unended(self._telling):
            await asyncio.wait(telling, timeout=LAST_WORDS_SECONDS)
        connections = self.servers.close()
        await self._unary.close()
        await asyncio.gather(*(connection.close() for connection in connections))
        await asyncio.gather(*unended(self._looking), return_exceptions=True)
        await asyncio.gather(*unended(self._closing))

    @property
    def is_connected(self) -> bool:
        """Whether there are connections that only `close` ends."""
        loop = self._loop
        return not (loop is None or loop.is_closed() or self.servers.is_closed or self._process.is_another)

    def seconds(self, timeout: Timeout) -> float | None:
        """How many seconds a call may take: as its caller says, or else the client. InvalidRequestError if that is no
        timeout.
        """
        return checked_timeout(timeout, self._settings.timeout)

    def send(self, call: EncodedCall[T], parent: Context | None = None, home: str | None = None) -> asyncio.Future[T]:
        """Sends a call, to the server at `home` if only that one can answer it; `parent` is the context of its parent
        span. ClientClosedError, here and below, if the client belongs to another process.
        """
        self._process.enter()
        operation = call.operation
        future: CallFuture[Any, T]
        if self._settings.transport == "stream":
            future = self._call_future(call.result, operation.path, parent)
            if self._find_for(home) is not None:
                task = asyncio.get_running_loop().create_task(self._send_when_found(future, call))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)
                task.add_done_callback(future.left_by)
                future.withdraw = task.cancel
            else:
                with Beginning(future):
                    self._send_on_stream(future, call, home)
        else:
            future = self._call_future(call.decode, operation.path, parent)
            route, find = partial(self.servers.connection, home), self._find_for(home)
            with Beginning(future):
                self._unary.submit(
                    UnaryCall.of(future, call, self._settings.policy, route, pinned=home is not None), find
                )
        return future

    def _future(self, finish: Callable[[Any], T]) -> CallFuture[Any, T]:
        """A future. RuntimeError in a loop other than that of the connections: nothing would settle it."""
        future = CallFuture(finish)
        self._check_loop(future.get_loop())
        return future

    def _check_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """RuntimeError if the connections belong to another loop."""
        if self._loop is not None and self._loop is not loop:
            raise RuntimeError("the client belongs to another event loop, in which it was first used: make one in each")

    def _call_future(self, finish: Callable[[Any], T], path: str, parent: Context | None) -> CallFuture[Any, T]:
        """The future of a call of the method at `path`, with its span. RuntimeError as for `_future`."""
        future = self._future(finish)
        if self._tracing is not None:
            future.span = self._tracing.begin(path, parent)
        return future

    def _find_for(self, home: str | None) -> Callable[[float | None], Awaitable[object]] | None:
        """The function to await before a call is sent, if a look-up is needed."""
        return self.servers.resolve_soon if home is None and self.servers.is_unresolved else None

    def _send_on_stream(self, future: CallFuture[Any, T], call: EncodedCall[T], home: str | None) -> None:
        try:
            stream = self.servers.connection(home).stream()
        except (UnavailableError, DeadlineExceededError) as error:
            future.settle(error)
        else:
            stream.submit(future, call, pinned=home is not None)

    async def _send_when_found(self, future: CallFuture[Any, T], call: EncodedCall[T]) -> None:
        try:
            call.timeout = await self.servers.resolve_soon(call.timeout)
            self._send_on_stream(future, call, None)
        except Exception as error:  # asyncio would report it only when the task is collected
            future.settle(error)

    def ask(
        self,
        rpc: Rpc[Any, T],
        timeout: Timeout,
        /,
        home: str | None = None,
        again: Again | None = None,
        given: float | None = None,
        parent: Context | None = None,
    ) -> asyncio.Future[T]:
        """Sends a plain RPC, which is given up after `timeout` seconds. If these are what is left of more, `given` is
        how many there were, for errors to name. With `again`, it is sent once: the caller decides on retries.
        """
        self._process.enter()
        find, seconds = self._find_for(home), self.seconds(timeout)
        future = self._call_future(rpc.decode, rpc.path, parent)
        route = partial(self.servers.connection, home)
        with Beginning(future):
            self._unary.submit(
                UnaryCall.of_rpc(
                    future, rpc, seconds, self._settings.policy, route, again, given, pinned=home is not None
                ),
                find,
            )
        return future

    async def make(
        self, rpc: Rpc[Any, CacheInfo], timeout: float | None, handle: Callable[[CacheInfo, str | None], T]
    ) -> T:
        """Has a cache made by the first server that can, within `timeout` seconds for each.

        Returns what `handle` makes of the cache's description and of the address for calls on it.
        """
        servers = self.servers.each_once(await self.servers.resolve_soon(timeout))
        with Making(rpc, self.tell) as making:
            for address, left, again in making.attempts(servers, self._settings.policy, timeout):
                try:
                    info = await self.ask(rpc, left, address, again, timeout)
                except (OverloadedError, UnavailableError) as error:
                    making.failed(error)
                else:
                    cache = handle(info, self.servers.home_of(address, info))
                    making.done()
                    return cache
        raise making.failure

    def tell(self, rpc: Rpc[Any, Any], home: str | None) -> None:
        """Sends an RPC whose answer nobody waits for; only `close` does, for a moment."""
        try:
            future = self.ask(rpc, TELLING_SECONDS, home)
        except ClientClosedError:
            return
        self._telling.add(future)
        future.add_done_callback(self._answered)

    def _answered(self, told: asyncio.Future[Any]) -> None:
        self._telling.discard(told)
        if not told.cancelled():
            told.exception()  # or asyncio would log that it was never retrieved

    def carry_out(self, plan: Plan[T]) -> asyncio.Future[T]:
        """Begins an operation on caches."""
        self._process.enter()
        future: CallFuture[T, T] = self._future(lambda result: result)
        parent = None if self._tracing is None else self._tracing.current()
        send = partial(self._send_request, parent, plan.home, plan.timeout)
        transaction = Transaction(self.turns, plan, send, future.settle)
        future.withdraw = transaction.cancel
        transaction.begin()
        return future

    def _send_request(
        self, parent: Context | None, home: str | None, given: float | None, request: Request, timeout: float | None
    ) -> asyncio.Future[Any]:
        """Sends one step of an operation. `given` is how many seconds all its steps have together."""
        if isinstance(request, Rpc):
            return self.ask(request, timeout, home, given=given, parent=parent)
        request.timeout, request.given = timeout, given
        return self.send(request, parent, home)

    def _connect(self, replica: Replica) -> Connection:
        """A connection, which belongs to the running loop."""
        self._settings.check_learned(replica.address)
        self._loop = asyncio.get_running_loop()
        others = partial(others_of, self.servers)
        return Connection(self._settings, self._identity.credentials, self._bearer, replica, others)

    def _dispose(self, connection: Connection) -> None:
        closing = asyncio.get_running_loop().create_task(connection.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _in_loop(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:  # the loop is closed, but the client was not
                self.servers.close()  # or its thread would look for servers for good
