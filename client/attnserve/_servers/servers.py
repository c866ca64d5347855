"""The servers of one client: found, watched, and connected to as needed.

In: what the client's address names, and how to connect to one address. Out: the connection for a call. Both clients use
it; they provide connections, and a way to run code where connections may be made, to take over new addresses.

The locks of futures and events are Python code, which a signal handler that raises would leave held, and whoever
brings the addresses waiting for them for ever: signals are delayed while one is used, but not while one is waited for.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from math import inf
from typing import Any, Final, Generic, TypeVar

from attnserve._errors import ClientClosedError, DeadlineExceededError, UnavailableError
from attnserve._interrupts import DelayedInterrupt
from attnserve._process import Process
from attnserve._requests.cache_requests import CacheInfo
from attnserve._servers import replicas
from attnserve._servers.replicas import Connection, Replica, Replicas
from attnserve._servers.resolver import Resolver
from attnserve._settings.retry import RetryPolicy
from attnserve._settings.targets import Target

C = TypeVar("C", bound=Connection)

_BUGS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def _is_bug(error: BaseException | None) -> bool:
    """Whether a look-up function that raises this is broken, and would raise it again. Errors of libraries may pass."""
    return isinstance(error, _BUGS) and not isinstance(error, OSError)  # a certificate's error is both


class Servers(Generic[C]):
    """Where the calls of a client go."""

    def __init__(
        self,
        process: Process,
        target: Target,
        refresh: float,
        policy: RetryPolicy,
        connect: Callable[[Replica], C],
        dispose: Callable[[C], object],
        run: Callable[[Callable[[], object]], object] = lambda function: function(),
        *,
        outdated: Callable[[], bool] | None,
    ) -> None:
        """If addresses are looked up, that is repeated every `refresh` seconds; `run` then calls a function where
        connections may be made. The first look-up is retried by `policy` if it fails. `outdated` says, once, that new
        connections would differ from those that exist.
        """
        self._process: Final = process
        self._target: Final = target
        self._refresh = refresh
        self._policy: Final = policy
        self._run = run
        self._outdated = outdated
        self._replicas = Replicas(connect, dispose)
        self._lock = threading.RLock()  # a call that is given up may close the client
        self._resolver: Resolver | None = None
        self._resolution: Future[Sequence[str]] | None = None
        self._retiring: threading.Timer | None = None
        self._failure: UnavailableError | None = None
        self._closed = False
        self._ended = threading.Event()
        self.resolved = False
        """Whether the servers' addresses are known."""

    def homes(self, timeout: float | None) -> Sequence[str | None]:
        """The servers' addresses, to ask one by one; None: wherever a single address leads. Raises what `resolve`
        does.
        """
        self.resolve(timeout)
        return self._replicas.addresses if self._knows_each else [None]

    @property
    def _knows_each(self) -> bool:
        return self._target.look_up is not None or len(self._target.fixed) > 1

    @property
    def is_closed(self) -> bool:
        """Whether the client is closed."""
        return self._closed

    @property
    def is_unresolved(self) -> bool:
        """Whether `resolve` may block on a look-up."""
        return not self.resolved and self._target.look_up is not None

    def home_of(self, address: str, info: CacheInfo) -> str | None:
        """The address for calls on a cache that the server at `address` has made: that, or the one in the cache's info;
        None if that names none.
        """
        return address if self._knows_each else info.address

    def home_for(self, alias: str, timeout: float | None) -> str | None:
        """The address of the server on which the cache of an alias is, if it exists: the same for all clients that know
        the same servers by the same addresses, and if one comes or goes, for all aliases but its own. None: wherever a
        single address leads. Raises what `resolve` does.

        Rendezvous hashing (Thaler and Ravishankar, 1996): the server that has the highest hash together with the alias.
        """
        return max(self.homes(timeout), key=lambda home: hashlib.sha256(f"{home} {alias}".encode()).digest())

    def connection(self, home: str | None = None, timeout: float | None = None, avoid: str | None = None) -> C:
        """The connection for a call: to the server `home`, or to any if that is None; to the one at `avoid` only if no
        other will do. Raises what `resolve` does.
        """
        self._process.enter()
        if self._outdated is not None and self._outdated():
            self._replicas.renew(time.monotonic())
            self._retire_later()
        if home is not None:
            if self._closed:
                raise ClientClosedError
            connection = self._replicas.at(home, time.monotonic())
            if self._retiring is None and self._replicas.lingering:
                self._retire_later()
            return connection
        if (only := self._replicas.only) is not None:
            return only
        self.resolve(timeout)
        return self._replicas.choose(time.monotonic(), avoid)

    def each_once(self, timeout: float | None) -> Iterator[str]:
        """The addresses at which to try to make a cache, the best first, until all have been tried. Raises what
        `resolve` does.
        """
        self.resolve(timeout)
        tried: set[str] = set()
        while (connection := self._replicas.choose_for_cache(tried, time.monotonic())) is not None:
            tried.add(connection.replica.address)
            yield connection.replica.address

    def others(self, connection: C) -> bool:
        """Whether the calls of a connection could move to another."""
        return self._replicas.others(connection)

    def others_answer(self, connection: C) -> bool:
        """Whether one of the others should answer, by all that is known."""
        return self._replicas.others_answer(connection, time.monotonic())

    def excess(self, connection: C) -> int:
        """How many calls of a connection others would answer sooner."""
        return self._replicas.excess(connection, time.monotonic())

    def resolve(self, timeout: float | None) -> float | None:
        """Finds the servers, if they are not known yet, and returns how many seconds of the timeout are left (None for
        no limit). Raises what `_look_up` does, and ClientClosedError if the client belongs to another process.
        """
        self._process.enter()
        if self.resolved:
            return timeout
        begin = time.monotonic()
        self.update(self._target.fixed or self._look_up(timeout))
        if self._closed:
            raise ClientClosedError
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))

    def _look_up(self, timeout: float | None) -> Sequence[str]:
        """The current addresses. UnavailableError if they cannot be looked up, or there are none; DeadlineExceededError
        if nothing is known within the timeout, and ClientClosedError if the client is closed before.
        """
        found = self.resolving()
        latch = threading.Lock()
        latch.acquire()
        with DelayedInterrupt():
            found.add_done_callback(lambda _: latch.release())
        is_found = latch.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        with DelayedInterrupt():
            failure = found.exception() if is_found else self.too_late()
        if failure is not None:
            raise of_caller(failure) from failure.__cause__
        with DelayedInterrupt():
            return found.result()

    def too_late(self) -> DeadlineExceededError | UnavailableError:
        """The error if a look-up takes longer than the call's timeout: why it has failed so far, if it has."""
        return self._failure or DeadlineExceededError(f"{self._target.name}: not looked up within the timeout")

    def resolving(self) -> Future[Sequence[str]]:
        """A future of the addresses, from a thread of its own, since a look-up cannot be interrupted. Only for names
        that are looked up; a caller that stops waiting must not cancel it. It fails as `_look_up` does.
        """
        self._process.enter()
        with DelayedInterrupt(), self._lock:
            if self._closed:
                raise ClientClosedError
            if self._resolution is None or self._resolution.done():
                found: Future[Sequence[str]] = Future()
                self._failure = None
                thread = threading.Thread(target=self._resolve_with_retries, args=(found,), daemon=True)
                thread.name = "attnserve-resolve"
                thread.start()
                self._resolution = found  # only once its thread has started
            return self._resolution

    def _resolve_with_retries(self, found: Future[Sequence[str]]) -> None:
        """Looks up the addresses, as often as a call may be sent: a name may be unknown, or a resolver out of reach,
        for a moment, which to gRPC, too, is a server that is unavailable. A bug in the caller's function is no such.
        """
        addresses: Sequence[str] = ()
        for attempts in itertools.count(1):
            try:
                addresses = self._resolve_once()
                break
            except UnavailableError as error:
                self._failure = error
                if _is_bug(error.__cause__):
                    break
            delay = self._policy.delay(attempts, 0.0, inf)
            if delay is None or self._ended.wait(delay):
                break
        with self._lock:
            if found.done():  # the client has been closed
                return
            if addresses:
                found.set_result(addresses)
            else:
                found.set_exception(self._failure)

    def _resolve_once(self) -> Sequence[str]:
        """The current addresses. UnavailableError if there are none."""
        assert self._target.look_up is not None  # fixed addresses need no look-up
        try:
            addresses = self._target.look_up()
        except OSError as error:
            raise UnavailableError(f"{self._target.name}: {error}") from error
        except BaseException as error:  # whatever else the caller's function raises, in a thread of ours
            raise UnavailableError(f"{self._target.name}: the function that looks it up raised {error!r}") from error
        if not addresses:
            raise UnavailableError(f"{self._target.name}: there is no server")
        return addresses

    def update(self, addresses: Sequence[str]) -> None:
        """Takes over the current addresses."""
        with DelayedInterrupt(), self._lock:
            if not self._closed:
                self._update(addresses)

    def _update(self, addresses: Sequence[str]) -> None:
        self._replicas.update(addresses, time.monotonic())
        self.resolved = True
        if self._resolver is None and self._target.look_up is not None:
            self._resolver = Resolver(self._target.look_up, self._refresh, self._deliver)
            self._replicas.look_up = self._resolver.ask

    def _deliver(self, addresses: Sequence[str]) -> None:
        self._run(lambda: self.update(addresses))

    def _retire_later(self) -> None:
        """Schedules the closing of connections that linger. If there is no thread for it, a later call does."""
        with DelayedInterrupt(), self._lock:
            if self._closed or self._retiring is not None:
                return
            timer = threading.Timer(replicas.FORGET_AFTER, _retire_there, (weakref.ref(self),))
            timer.daemon = True
            with suppress(RuntimeError):
                timer.start()
                self._retiring = timer

    def _retire(self) -> None:
        with self._lock:
            self._retiring = None
        if self._replicas.retire(time.monotonic()):
            self._retire_later()

    def close(self) -> Sequence[C]:
        """Ends look-ups, fails a pending one with ClientClosedError, and returns all connections, to be closed."""
        with DelayedInterrupt(), self._lock:
            self._closed = True
            self._ended.set()
            if self._resolution is not None and not self._resolution.done():
                self._resolution.set_exception(ClientClosedError())
            if self._resolver is not None:
                self._resolver.close()
            if self._retiring is not None:
                self._retiring.cancel()
            return self._replicas.close()


def of_caller(failure: BaseException) -> BaseException:
    """A failure for one of several callers: an exception takes up the frames of whoever raises it, and what is in them.
    It is to be raised from the cause of the failure.
    """
    return copy(failure)


def _retire_there(servers: weakref.ref[Servers[Any]]) -> None:
    """Closes what lingers, where connections may be closed; in a timer, which keeps no client alive."""
    if (alive := servers()) is not None:
        alive._run(alive._retire)
