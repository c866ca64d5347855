"""The client for asyncio: the surface of `Client`, awaited.

In: the arguments of an operation. Out: its result, or a future of it. The parts: `_attend` and `_apply` encode,
`_tasks` carries, `_reply` decodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc.aio

from attnserve import _cache_requests, _plans
from attnserve._apply import ApplyOptions, encode_apply
from attnserve._arguments import ArrayLike, ArrayT
from attnserve._attend import AttendOptions, encode_attend
from attnserve._caches import AsyncCache, AsyncCaches
from attnserve._call import EncodedCall
from attnserve._config import DEFAULT_ADDRESS, Settings, Transport, checked_timeout
from attnserve._credentials import TLS, Bearer, Token, as_token
from attnserve._errors import ClientClosedError
from attnserve._health import LIVENESS, READINESS
from attnserve._info import SERVER_INFO, ServerInfo
from attnserve._layers import AsyncLayers
from attnserve._plans import CacheState, CacheStates, Plan, Request
from attnserve._reply import decode_response
from attnserve._result import AttentionResult, LayerResult
from attnserve._retry import RetryPolicy
from attnserve._rpc import Rpc
from attnserve._tasks import CallFuture, StreamTransport, UnaryTransport, later
from attnserve._tracing import tracing_of
from attnserve._transaction import Transaction
from attnserve._turns import Turns

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
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        transport: Transport = "stream",
        timeout: float | None = 60.0,
        retries: int = 3,
        streams: int = 1,
        options: Sequence[tuple[str, Any]] = (),
        tls: TLS | None = None,
        token: str | Token | None = None,
        tracing: bool | TracerProvider = False,
    ) -> None:
        """Sets up a client, as `Client` does. ValueError names an argument that is wrong."""
        self._settings = Settings(address, transport, timeout, retries, streams, tuple(options), tls, as_token(token))
        self._credentials, self._bearer = self._settings.channel_credentials, Bearer(self._settings.token)
        self._tracing = tracing_of(tracing, address)
        self._connection: _Connection | None = None
        self._turns = Turns(later)
        self._closed = False

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
        return AsyncCache(self, await self._ask(rpc, timeout))

    async def open_cache(self, name: str, *, timeout: float | None = 60.0) -> AsyncCache:
        """A cache that was made elsewhere, by its name. `NotFoundError` if none of the caller's has it."""
        return AsyncCache(self, await self.caches.get(name, timeout=timeout))

    @property
    def caches(self) -> AsyncCaches:
        """The caller's caches on the server: ``list``, ``pool``, ``get`` and ``delete``, to be awaited."""
        return AsyncCaches(self._ask)

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
        self._closed = True
        if self._connection is not None:
            await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _send(self, call: EncodedCall[T], parent: Context | None = None) -> asyncio.Future[T]:
        connection = self._connected()
        future: CallFuture[Any, T]
        if connection.streams:
            future = CallFuture(call.result)
            if self._tracing is not None:
                future.span = self._tracing.begin(call.operation.path, parent)
            streams = connection.streams
            stream = streams[0] if len(streams) == 1 else min(streams, key=len)
            stream.submit(future, call)
        else:
            operation = call.operation
            future = CallFuture(lambda data: call.result(decode_response(operation, data)))
            if self._tracing is not None:
                future.span = self._tracing.begin(operation.path, parent)
            connection.unary.submit(future, operation.path, call.pieces, call.timeout)
        return future

    def _ask(self, rpc: Rpc[Any, T], timeout: float | None, /, parent: Context | None = None) -> asyncio.Future[T]:
        future = CallFuture(rpc.decode)
        if self._tracing is not None:
            future.span = self._tracing.begin(rpc.path, parent)
        unary = self._connected().unary
        unary.submit(future, rpc.path, rpc.pieces, checked_timeout(timeout), repeatable=rpc.repeatable)
        return future

    def _perform(self, plan: Plan[T]) -> asyncio.Future[T]:
        future: CallFuture[T, T] = CallFuture(lambda result: result)
        parent = None if self._tracing is None else self._tracing.current()
        transaction = Transaction(self._turns, plan, partial(self._send_request, parent), future.settle)
        future.withdraw = transaction.cancel
        transaction.begin()
        return future

    def _send_request(self, parent: Context | None, request: Request, timeout: float | None) -> asyncio.Future[Any]:
        if isinstance(request, Rpc):
            return self._ask(request, timeout, parent)
        request.timeout = timeout
        return self._send(request, parent)

    def _connected(self) -> _Connection:
        """The connection, made in the running loop when it is first needed."""
        if self._closed:
            raise ClientClosedError
        if self._connection is None:
            self._connection = _Connection(self._settings, self._credentials, self._bearer)
        return self._connection


class _Connection:
    """The channel of a client and what travels on it."""

    def __init__(self, settings: Settings, credentials: grpc.ChannelCredentials | None, bearer: Bearer) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(settings.address, options=settings.channel_options)
        else:
            self._channel = grpc.aio.secure_channel(settings.address, credentials, options=settings.channel_options)
        policy = RetryPolicy(settings.retries)
        self.unary = UnaryTransport(self._channel, policy, bearer)
        self.streams = (
            [StreamTransport(self._channel, policy, bearer) for _ in range(settings.streams)]
            if settings.transport == "stream"
            else []
        )

    async def close(self) -> None:
        await self.unary.close()
        for stream in self.streams:
            await stream.close()
        await self._channel.close()
