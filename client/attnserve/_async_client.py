"""The client for asyncio: the surface of `Client`, awaited.

In: the arguments of an operation. Out: its result, or a future of it. The parts: `_attend` and `_apply` encode,
`_tasks` carries, `_reply` decodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from attnserve import _arguments, _cache_requests, _plans
from attnserve._apply import ApplyOptions, encode_apply
from attnserve._arguments import ArrayLike, ArrayT
from attnserve._attend import AttendOptions, encode_attend
from attnserve._caches import AsyncCache, AsyncCaches
from attnserve._call import EncodedCall
from attnserve._config import DEFAULT_ADDRESS, Settings, Transport, checked_timeout
from attnserve._credentials import TLS, Bearer, Identity, Token, as_token
from attnserve._errors import AttnServeError, DeadlineExceededError, PermissionDeniedError, UnavailableError
from attnserve._health import LIVENESS, READINESS
from attnserve._info import SERVER_INFO, ServerInfo
from attnserve._layers import AsyncLayers
from attnserve._multiplexer import Call
from attnserve._plans import CacheState, CacheStates, Plan, Request
from attnserve._replicas import Replica
from attnserve._reply import decode_response
from attnserve._result import AttentionResult, LayerResult
from attnserve._retry import RetryPolicy
from attnserve._rpc import Rpc
from attnserve._targets import Address
from attnserve._task_connection import Connection
from attnserve._task_servers import TaskServers
from attnserve._tasks import CallFuture, StreamFuture, later
from attnserve._tracing import tracing_of
from attnserve._transaction import Transaction
from attnserve._turns import Turns
from attnserve._unary_tasks import UnaryTransport

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider

T = TypeVar("T")


class AsyncClient:
    """A connection to an attention service, for one event loop.

        async with AsyncClient("127.0.0.1:8001") as client:
            result = await client.attend(query, key, value, causal=True)

    It belongs to the loop in which it is first used; gRPC wants one event loop in a process to be the only one that it
    meets. Otherwise everything is as with `Client`, but that it must be closed: it does not notice being forgotten.
    Names are first looked up by `async with`, or else by the first call.
    """

    def __init__(
        self,
        address: Address = DEFAULT_ADDRESS,
        *,
        transport: Transport = "stream",
        timeout: float | None = 60.0,
        retries: int = 3,
        streams: int = 1,
        options: Sequence[tuple[str, Any]] = (),
        tls: TLS | None = None,
        token: str | Token | None = None,
        refresh: float = 10.0,
        tracing: bool | TracerProvider = False,
    ) -> None:
        """Sets up a client, as `Client` does. ValueError names an argument that is wrong."""
        self._settings = Settings(
            address, transport, timeout, retries, streams, tuple(options), tls, as_token(token), refresh
        )
        self._identity, self._bearer = Identity(tls), Bearer(self._settings.token)
        self._tracing = tracing_of(tracing, self._settings.target.name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers = TaskServers(
            self._settings.target,
            self._settings.refresh,
            self._connect,
            self._dispose,
            self._in_loop,
            None if tls is None else self._identity.changed,
        )
        self._unary = UnaryTransport(RetryPolicy(retries), self._bearer)
        self._looking: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._turns = Turns(later)

    async def attend(
        self,
        query: ArrayT,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        caches: CacheStates | None = None,
        cache_layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[ArrayT]:
        """Computes one attention. Arguments, result and errors are those of `Client.attend`.

        Cancelling the task that awaits it has the server told.
        """
        return await self.submit(query, key, value, caches=caches, cache_layer=cache_layer, **options)

    def submit(
        self,
        query: ArrayT,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        caches: CacheStates | None = None,
        cache_layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> asyncio.Future[AttentionResult[ArrayT]]:
        """Asks for one attention and returns a future of its result. Arguments are those of `Client.attend`.

        What is wrong with the arguments themselves is raised here; everything else is raised by the future.
        """
        timeout = self._settings.timeout
        if caches is None:
            return self._send(encode_attend(query, key, value, default_timeout=timeout, **options))
        return self._perform(_plans.attend(self._turns, caches, cache_layer, query, key, value, timeout, options))

    async def apply(
        self,
        layer: str,
        input: ArrayT,
        *,
        caches: CacheStates | None = None,
        cache: CacheState | None = None,
        **options: Unpack[ApplyOptions],
    ) -> LayerResult[ArrayT]:
        """Applies a layer whose weights the server holds. Arguments, result and errors are those of `Client.apply`.

        Cancelling the task that awaits it has the server told.
        """
        return await self.submit_apply(layer, input, caches=caches, cache=cache, **options)

    def submit_apply(
        self,
        layer: str,
        input: ArrayT,
        *,
        caches: CacheStates | None = None,
        cache: CacheState | None = None,
        **options: Unpack[ApplyOptions],
    ) -> asyncio.Future[LayerResult[ArrayT]]:
        """Asks for a layer to be applied and returns a future of the result.

        Arguments are those of `Client.apply`; the future is as that of `submit`.
        """
        timeout = self._settings.timeout
        chosen = _plans.one_or_many(cache, caches)
        if chosen is None:
            return self._send(encode_apply(layer, input, default_timeout=timeout, **options))
        return self._perform(_plans.apply(self._turns, chosen, layer, input, timeout, options))

    @property
    def layers(self) -> AsyncLayers:
        """The layers that the server holds: ``list``, ``get``, ``load`` and ``unload``, to be awaited."""
        return AsyncLayers(self._ask)

    async def create_cache(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layers: int = 1,
        dtype: Any = "float32",
        ttl: float | None = None,
        timeout: float | None = 60.0,
    ) -> AsyncCache:
        """Creates an empty cache on the server. Arguments are those of `Client.create_cache`.

        As a context manager it deletes the cache when the body ends: ``async with await client.create_cache(8, 64)``.
        """
        rpc = _cache_requests.create(num_kv_heads, head_dim, value_dim, layers, dtype, ttl)
        failure = UnavailableError("there is no server")
        for replica in self._servers.each_once(await self._servers.find_soon(checked_timeout(timeout))):
            try:
                info = await self._ask(rpc, timeout, replica.address)
            except UnavailableError as error:
                failure = error
            else:
                return AsyncCache(self, info, self._servers.home_of(replica, info))
        raise failure

    async def open_cache(self, name: str, *, address: str | None = None, timeout: float | None = 60.0) -> AsyncCache:
        """A cache that was made elsewhere, by its name, as `Client.open_cache` finds it."""
        if address is not None:
            address = _arguments.address("address", address)
            return AsyncCache(self, await self._ask(_cache_requests.get(name), timeout, address), address)
        info, home = await self.caches.find(name, timeout)
        return AsyncCache(self, info, home or info.address)

    @property
    def caches(self) -> AsyncCaches:
        """The caller's caches on the server: ``list``, ``pool``, ``get`` and ``delete``, to be awaited."""
        return AsyncCaches(self._ask, self._servers)

    async def server_info(self, *, timeout: float | None = 60.0) -> ServerInfo:
        """What the server is. `timeout` in seconds; None for no limit. Raises an `AttnServeError`."""
        return await self._ask(SERVER_INFO, timeout)

    async def is_ready(self, *, timeout: float | None = 60.0) -> bool:
        """Whether the server takes requests. `timeout` in seconds; None for no limit. Raises an `AttnServeError`."""
        return await self._ask(READINESS, timeout)

    async def is_alive(self, *, timeout: float | None = 60.0) -> bool:
        """Whether the server is of use: while it starts or drains too. Arguments and errors are those of `is_ready`."""
        return await self._ask(LIVENESS, timeout)

    async def close(self) -> None:
        """Ends the connection. Calls in flight fail with `ClientClosedError`."""
        connections = self._servers.close()
        await self._unary.close()
        for connection in connections:
            await connection.close()
        await asyncio.gather(*self._looking, return_exceptions=True)
        await asyncio.gather(*self._closing)

    async def __aenter__(self) -> Self:
        if self._servers.must_look:
            with suppress(UnavailableError, DeadlineExceededError):  # the first call says so
                await self._servers.find_soon(self._settings.timeout)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _send(self, call: EncodedCall[T], parent: Context | None = None, home: str | None = None) -> asyncio.Future[T]:
        future: CallFuture[Any, T]
        if self._settings.transport == "stream":
            future = CallFuture(call.result)
            if self._tracing is not None:
                future.span = self._tracing.begin(call.operation.path, parent)
            if self._find_for(home) is not None:
                task = asyncio.get_running_loop().create_task(self._send_when_found(future, call))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)
                future.withdraw = task.cancel
            else:
                self._send_on_stream(future, call, home)
        else:
            operation = call.operation
            future = CallFuture(lambda data: call.result(decode_response(operation, data)))
            if self._tracing is not None:
                future.span = self._tracing.begin(operation.path, parent)
            route, find = partial(self._servers.connection, home), self._find_for(home)
            self._unary.submit(future, operation.path, call.pieces, call.timeout, route, find=find)
        return future

    def _find_for(self, home: str | None) -> Callable[[float | None], Awaitable[object]] | None:
        """What is to be awaited before a call is sent, if anything is."""
        return self._servers.find_soon if home is None and self._servers.must_look else None

    def _send_on_stream(self, future: CallFuture[Any, T], call: EncodedCall[T], home: str | None) -> None:
        try:
            stream = self._servers.connection(home).stream()
        except (UnavailableError, DeadlineExceededError) as error:
            future.settle(error)
        else:
            stream.submit(future, call, pinned=home is not None)

    async def _send_when_found(self, future: CallFuture[Any, T], call: EncodedCall[T]) -> None:
        try:
            call.timeout = await self._servers.find_soon(call.timeout)
            self._send_on_stream(future, call, None)
        except Exception as error:  # of which asyncio would only tell when the task is collected
            future.settle(error)

    def _ask(
        self,
        rpc: Rpc[Any, T],
        timeout: float | None,
        /,
        home: str | None = None,
        parent: Context | None = None,
    ) -> asyncio.Future[T]:
        future = CallFuture(rpc.decode)
        if self._tracing is not None:
            future.span = self._tracing.begin(rpc.path, parent)
        route, find, timeout = partial(self._servers.connection, home), self._find_for(home), checked_timeout(timeout)
        self._unary.submit(future, rpc.path, rpc.pieces, timeout, route, repeatable=rpc.repeatable, find=find)
        return future

    def _perform(self, plan: Plan[T]) -> asyncio.Future[T]:
        future: CallFuture[T, T] = CallFuture(lambda result: result)
        parent = None if self._tracing is None else self._tracing.current()
        transaction = Transaction(self._turns, plan, partial(self._send_request, parent, plan.home), future.settle)
        future.withdraw = transaction.cancel
        transaction.begin()
        return future

    def _send_request(
        self, parent: Context | None, home: str | None, request: Request, timeout: float | None
    ) -> asyncio.Future[Any]:
        if isinstance(request, Rpc):
            return self._ask(request, timeout, home, parent)
        request.timeout = timeout
        return self._send(request, parent, home)

    def _connect(self, replica: Replica) -> Connection:
        """A connection, which belongs to the running loop."""
        try:
            self._settings.check_secrecy(replica.address)
        except ValueError as error:  # the server itself has said where it is
            raise PermissionDeniedError(str(error)) from None
        self._loop = asyncio.get_running_loop()
        credentials = self._identity.credentials
        return Connection(self._settings, credentials, self._bearer, replica, self._servers.others, self._move)

    def _move(self, call: Call[StreamFuture]) -> None:
        try:
            self._servers.connection().stream().adopt(call)
        except AttnServeError as error:
            call.owner.settle(error)

    def _dispose(self, connection: Connection) -> None:
        closing = asyncio.get_running_loop().create_task(connection.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _in_loop(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed, and the client has not been
                self._loop.call_soon_threadsafe(function)
