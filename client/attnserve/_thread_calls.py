"""How a threaded client makes its calls: over which transport, to which server, in which order, under which span.

In: encoded calls, plain RPCs, and the plans of operations on caches. Out: futures, or answers. Nothing here keeps the
client alive; whoever waits for a reply keeps this alive.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attnserve._caching.creation import Making
from attnserve._caching.plans import Plan, Request
from attnserve._caching.transaction import Transaction, perform
from attnserve._caching.turns import Turns
from attnserve._errors import (
    ClientClosedError,
    DeadlineExceededError,
    OverloadedError,
    UnavailableError,
    no_reply,
)
from attnserve._process import Process
from attnserve._requests.cache_requests import CacheInfo
from attnserve._requests.call import EncodedCall
from attnserve._rpc import Rpc
from attnserve._servers.replicas import Replica
from attnserve._servers.servers import Servers
from attnserve._settings.config import (
    GRACE_SECONDS,
    LAST_WORDS_SECONDS,
    TELLING_SECONDS,
    Settings,
    Timeout,
    checked_timeout,
)
from attnserve._settings.credentials import Bearer, Identity
from attnserve._settings.retry import Again
from attnserve._tracing import Tracing
from attnserve._transports.connection import others_of
from attnserve._transports.locks import LockHeld
from attnserve._transports.outcome import Beginning
from attnserve._transports.thread_connection import Connection
from attnserve._transports.thread_future import CallFuture, later
from attnserve._transports.unary_threads import ThreadCall, UnaryTransport

if TYPE_CHECKING:
    from opentelemetry.context import Context

T = TypeVar("T")


class Calls:
    """A client's calls in flight, and the servers that it knows."""

    def __init__(self, settings: Settings, tracing: Tracing | None) -> None:
        self._settings = settings
        bearer = Bearer(settings.token)
        self._process = Process()
        self.servers: Final = _servers(settings, self._process, Identity(settings.tls), bearer)
        """The servers of the client."""
        if settings.target.fixed:
            self.servers.update(settings.target.fixed)
        self.turns: Final = Turns(later)
        """The order of operations on caches."""
        self._unary = UnaryTransport(bearer)
        self._telling: set[CallFuture[Any, Any]] = set()
        self._streaming = settings.transport == "stream"
        self._tracing = tracing
        # For a client that is dropped without being closed. The finalizer may run in any thread, even one of the
        # transports' own that holds its lock, so it must not close anything itself.
        self._forgotten = weakref.finalize(self, _close_elsewhere, self._process, self._unary, self.servers)
        self._forgotten.atexit = False

    def close(self) -> None:
        """Ends the connections, unless another process opened them or the interpreter is ending, which ends them, too.
        Calls in flight fail with `ClientClosedError`.
        """
        if self.lacks_threads:
            return
        end = time.monotonic() + LAST_WORDS_SECONDS
        for told in list(self._telling):
            told.is_done_within(end - time.monotonic())
        self._forgotten.detach()
        _close(self._unary, self.servers)

    @property
    def lacks_threads(self) -> bool:
        """Whether the client's threads exist no more: after a fork, or as the interpreter ends."""
        return self._process.lacks_threads

    def seconds(self, timeout: Timeout) -> float | None:
        """How many seconds a call may take: as its caller says, or else the client. InvalidRequestError if that is no
        timeout.
        """
        return checked_timeout(timeout, self._settings.timeout)

    def send(self, call: EncodedCall[T], parent: Context | None = None, home: str | None = None) -> CallFuture[Any, T]:
        """Sends a call, to the server at `home` if only that one can answer it; `parent` is the context of its parent
        span. ClientClosedError, here and below, if the client belongs to another process.
        """
        self._process.enter()
        operation = call.operation
        future: CallFuture[Any, T]
        if self._streaming:
            future = self._future(call.result, call.timeout, operation.path, parent)
            future.calls = self  # before it is sent, since the reply clears this
            with Beginning(future):
                self._send_on_stream(future, call, home)
        else:
            future = self._future(call.decode, call.timeout, operation.path, parent)
            future.calls = self
            route = partial(self.servers.connection, home)
            with Beginning(future):
                self._unary.submit(ThreadCall.of(future, call, self._settings.policy, route, pinned=home is not None))
        return future

    def _future(
        self, finish: Callable[[Any], T], timeout: float | None, path: str, parent: Context | None
    ) -> CallFuture[Any, T]:
        """The future of a call of the method at `path`, with its span."""
        future = CallFuture(finish)
        future.timeout = timeout
        if self._tracing is not None:
            future.span = self._tracing.begin(path, parent)
        return future

    def _send_on_stream(self, future: CallFuture[Any, T], call: EncodedCall[T], home: str | None) -> None:
        try:
            if home is None:
                call.timeout = self.servers.resolve(call.timeout)
            stream = self.servers.connection(home).stream()
        except (UnavailableError, DeadlineExceededError) as error:
            future.settle(error)
        else:
            stream.submit(future, call, pinned=home is not None)

    def ask(
        self,
        rpc: Rpc[Any, T],
        timeout: Timeout,
        /,
        home: str | None = None,
        again: Again | None = None,
        given: float | None = None,
    ) -> T:
        """Sends a plain RPC and returns its answer, within `timeout` seconds. If these are what is left of more,
        `given` is how many there were, for errors to name. With `again`, it is sent once: the caller decides on
        retries.
        """
        return wait(self._send_rpc(rpc, self.seconds(timeout), None, home, again, given), given)

    def make(self, rpc: Rpc[Any, CacheInfo], timeout: float | None, handle: Callable[[CacheInfo, str | None], T]) -> T:
        """Has a cache made by the first server that can, within `timeout` seconds for each.

        Returns what `handle` makes of the cache's description and of the address for calls on it.
        """
        with Making(rpc, self.tell) as making:
            servers = self.servers.each_once(timeout)
            for address, left, again in making.attempts(servers, self._settings.policy, timeout):
                try:
                    info = self.ask(rpc, left, address, again, timeout)
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
            future = self._send_rpc(rpc, TELLING_SECONDS, None, home)
        except ClientClosedError:
            return
        self._telling.add(future)
        future.add_done_callback(self._telling.discard)

    def _send_rpc(
        self,
        rpc: Rpc[Any, T],
        timeout: float | None,
        parent: Context | None,
        home: str | None,
        again: Again | None = None,
        given: float | None = None,
    ) -> CallFuture[Any, T]:
        self._process.enter()
        future = self._future(rpc.decode, timeout, rpc.path, parent)
        route = partial(self.servers.connection, home)
        with Beginning(future):
            self._unary.submit(
                ThreadCall.of_rpc(
                    future, rpc, timeout, self._settings.policy, route, again, given, pinned=home is not None
                )
            )
        return future

    def perform(self, plan: Plan[T]) -> T:
        """Carries out an operation on caches, and returns its result."""
        self._process.enter()
        parent = None if self._tracing is None else self._tracing.current()

        def ask(request: Request, timeout: float | None) -> Any:
            return wait(self._send_request(parent, plan.home, plan.timeout, request, timeout), plan.timeout)

        return perform(self.turns, plan, ask)

    def carry_out(self, plan: Plan[T]) -> Future[T]:
        """Begins an operation on caches."""
        self._process.enter()
        future: CallFuture[T, T] = CallFuture(lambda result: result)
        # Each step runs in the thread that brings the reply to the previous one, which has another context.
        parent = None if self._tracing is None else self._tracing.current()
        send = partial(self._send_request, parent, plan.home, plan.timeout)
        transaction = Transaction(self.turns, plan, send, future.settle)
        future.withdraw = partial(_give_up, transaction)
        future.calls = self
        transaction.begin()
        return future

    def _send_request(
        self, parent: Context | None, home: str | None, given: float | None, request: Request, timeout: float | None
    ) -> CallFuture[Any, Any]:
        """Sends one step of an operation. `given` is how many seconds all its steps have together."""
        if isinstance(request, Rpc):
            return self._send_rpc(request, timeout, parent, home, given=given)
        request.timeout, request.given = timeout, given
        return self.send(request, parent, home)


def _give_up(transaction: Transaction[Any], *, waits: bool) -> bool:
    if not waits:  # the next operation begins here, and takes locks
        raise LockHeld
    return transaction.cancel()


def wait(future: Future[T], given: float | None = None) -> T:
    """Waits for the result of a future. If a signal handler ends the wait, the call is given up. DeadlineExceededError
    if there is no outcome a while after the timeout (`GRACE_SECONDS`): then the thread that should have brought one
    does not run any more. `given` is the timeout for the error to name, if that of the future is what was left of it.
    """
    assert isinstance(future, CallFuture)  # all that a client gives to its callers are
    timeout = future.timeout
    try:
        if timeout is None or future.is_done_within(timeout + GRACE_SECONDS):
            result: T = future.result()
            return result
    except BaseException:
        future.cancel()  # has no effect unless it was a signal handler
        raise
    else:
        with suppress(RuntimeError):  # no thread can be started
            later(0.0, future.cancel)
        raise DeadlineExceededError(f"{no_reply(given or timeout)}, nor word from gRPC that it is late")
    finally:
        del future  # a cycle: it holds the error, and that this frame; only the garbage collector would free both


def _servers(settings: Settings, process: Process, identity: Identity, bearer: Bearer) -> Servers[Connection]:
    """The servers of a client; they must not keep the client alive."""

    def connect(replica: Replica) -> Connection:
        settings.check_learned(replica.address)
        return Connection(settings, identity.credentials, bearer, replica, partial(others_of, servers))

    outdated = None if settings.tls is None else identity.changed
    servers: Servers[Connection] = Servers(
        process, settings.target, settings.refresh, settings.policy, connect, Connection.close, outdated=outdated
    )
    return servers


def _close(unary: UnaryTransport, servers: Servers[Connection]) -> None:
    connections = servers.close()
    unary.close()
    for connection in connections:
        connection.close()


def _close_elsewhere(process: Process, unary: UnaryTransport, servers: Servers[Connection]) -> None:
    if process.lacks_threads:
        return
    threading.Thread(target=_close, args=(unary, servers), name="attnserve-close", daemon=True).start()
