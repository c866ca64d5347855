"""The client for asyncio: the surface of `Client`, awaited.

In: the arguments of an operation. Out: its result, or a future of it. The parts: `_requests` encodes and decodes,
`_transports.tasks` carries.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from attnserve._caching import plans
from attnserve._caching.caches import AsyncCache, AsyncCaches
from attnserve._caching.finding import find_soon
from attnserve._caching.pending import pending
from attnserve._errors import ClientClosedError, DeadlineExceededError, UnavailableError
from attnserve._health import LIVENESS, READINESS, Patience
from attnserve._info import SERVER_INFO, ServerInfo
from attnserve._layers import AsyncLayers
from attnserve._requests import arguments, cache_requests
from attnserve._requests.apply import ApplyOptions, encode_apply
from attnserve._requests.arguments import ArrayLike, ArrayOf, KindT
from attnserve._requests.attend import AttendOptions, encode_attend
from attnserve._requests.result import AttentionResult, LayerResult
from attnserve._settings.config import DEFAULT_ADDRESS, Settings, Timeout, Transport
from attnserve._settings.credentials import TLS, Token, as_token
from attnserve._settings.targets import Address
from attnserve._task_calls import Calls
from attnserve._tracing import tracing_of

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
else:
    TracerProvider = Any  # for whoever reads annotations where there is no OpenTelemetry


class AsyncClient:
    """A connection to an attention service, for one event loop.

        async with AsyncClient("127.0.0.1:8001") as client:
            result = await client.attend(query, key, value, causal=True)

    It belongs to the loop in which it is first used, and raises RuntimeError in others; gRPC supports only one event
    loop per process. Otherwise everything is as with `Client`, except that it must be closed: it is not closed when it
    is garbage-collected, which a ResourceWarning then says. Names are first looked up by `async with`, or else by the
    first call.

    A process that has one, or had one that is not collected yet, should spawn processes, not fork: in the child of a
    fork every call of an `AsyncClient`, even a new one, raises `ClientClosedError`, since gRPC has no asyncio there.
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
        """Sets up a client, as `Client` does. Raises ValueError, which names the wrong argument."""
        self._settings = Settings(address, transport, timeout, retries, streams, options, tls, as_token(token), refresh)
        self._calls = Calls(self._settings, tracing_of(tracing, self._settings.target.name))

    @arguments.takes_options(AttendOptions, encode_attend)
    async def attend(
        self,
        query: ArrayOf[KindT],
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        caches: AsyncCache | Iterable[AsyncCache] | None = None,
        cache_layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[KindT]:
        """Computes one attention. Arguments, result and errors are those of `Client.attend`.

        Cancelling the task that awaits it also tells the server.
        """
        arguments.check_options("attend", options, AttendOptions, "key", "value", "caches", "cache_layer")
        return await self.submit(query, key, value, caches=caches, cache_layer=cache_layer, **options)

    @arguments.takes_options(AttendOptions, encode_attend)
    def submit(
        self,
        query: ArrayOf[KindT],
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        caches: AsyncCache | Iterable[AsyncCache] | None = None,
        cache_layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> asyncio.Future[AttentionResult[KindT]]:
        """Asks for one attention and returns a future of its result. Arguments are those of `Client.attend`.

        Errors that take no server to find, in the arguments or because the client is closed, are raised here, all
        others by the future.
        """
        arguments.check_options("submit", options, AttendOptions, "key", "value", "caches", "cache_layer")
        timeout = self._settings.timeout
        if caches is None:
            arguments.check_no_layer(cache_layer)
            return self._calls.send(encode_attend(query, key, value, default_timeout=timeout, **options))
        return self._calls.carry_out(
            plans.attend(self._calls.turns, caches, cache_layer, query, key, value, timeout, options)
        )

    @arguments.takes_options(ApplyOptions, encode_apply)
    async def apply(
        self,
        layer: str,
        input: ArrayOf[KindT],
        *,
        caches: AsyncCache | Iterable[AsyncCache] | None = None,
        cache: AsyncCache | None = None,
        **options: Unpack[ApplyOptions],
    ) -> LayerResult[KindT]:
        """Applies a layer whose weights the server holds. Arguments, result and errors are those of `Client.apply`.

        Cancelling the task that awaits it also tells the server.
        """
        arguments.check_options("apply", options, ApplyOptions, "caches", "cache", hints=arguments.OF_A_LAYER)
        return await self.submit_apply(layer, input, caches=caches, cache=cache, **options)

    @arguments.takes_options(ApplyOptions, encode_apply)
    def submit_apply(
        self,
        layer: str,
        input: ArrayOf[KindT],
        *,
        caches: AsyncCache | Iterable[AsyncCache] | None = None,
        cache: AsyncCache | None = None,
        **options: Unpack[ApplyOptions],
    ) -> asyncio.Future[LayerResult[KindT]]:
        """Asks for a layer to be applied and returns a future of the result.

        Arguments are those of `Client.apply`; the future is like that of `submit`.
        """
        arguments.check_options("submit_apply", options, ApplyOptions, "caches", "cache", hints=arguments.OF_A_LAYER)
        timeout = self._settings.timeout
        chosen = plans.one_or_many(cache, caches)
        if chosen is None:
            return self._calls.send(encode_apply(layer, input, default_timeout=timeout, **options))
        return self._calls.carry_out(plans.apply(self._calls.turns, chosen, layer, input, timeout, options))

    @property
    def layers(self) -> AsyncLayers:
        """The layers on the servers: ``list``, ``get``, ``load`` and ``unload``, to be awaited."""
        return AsyncLayers(self._calls)

    @pending
    async def create_cache(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layers: int = 1,
        dtype: Any = "float32",
        ttl: float | None = None,
        alias: str | None = None,
        timeout: Timeout = ...,
    ) -> AsyncCache:
        """Creates an empty cache on the server. Arguments are those of `Client.create_cache`.

        What it returns can be awaited, or entered: ``async with client.create_cache(8, 64) as cache`` deletes the cache
        when the body ends.
        """
        rpc = cache_requests.create(num_kv_heads, head_dim, value_dim, layers, dtype, ttl, alias)
        timeout = self._calls.seconds(timeout)
        if alias is not None:
            home = self._calls.servers.home_for(alias, await self._calls.servers.resolve_soon(timeout))
            info = await self._calls.ask(rpc, timeout, home)
            return AsyncCache(self, info, home or info.address, opened=True)
        return await self._calls.make(rpc, timeout, partial(AsyncCache, self))

    @pending
    async def open_cache(self, name: str, *, address: str | None = None, timeout: Timeout = ...) -> AsyncCache:
        """A cache that was created elsewhere, by its name, as `Client.open_cache` finds it. It can be entered as with
        `create_cache`, which deletes it in the end: do not enter what others still use.
        """
        if address is not None:
            address = arguments.address("address", address)
            info = await self._calls.ask(cache_requests.get(name), timeout, address)
            return AsyncCache(self, info, address, opened=True)
        info, home = await find_soon(self._calls, name, timeout)
        return AsyncCache(self, info, home or info.address, opened=True)

    @property
    def caches(self) -> AsyncCaches:
        """The caller's caches on the server: ``list``, ``pool``, ``get``, ``fork``, ``truncate`` and ``delete``, to be
        awaited.
        """
        return AsyncCaches(self)

    async def server_info(self, *, timeout: Timeout = ...) -> ServerInfo:
        """Describes the server, also while it starts or drains. `timeout` in seconds; None for no limit; by
        default the client's. Raises an `AttnServeError`.
        """
        return await self._calls.ask(SERVER_INFO, timeout)

    async def is_ready(self, *, timeout: Timeout = ...) -> bool:
        """Whether to send requests to the server: False while it starts or drains. `timeout` in seconds; None for no
        limit; by default the client's. Raises an `AttnServeError`, `UnavailableError` if it cannot be reached.
        """
        return await self._calls.ask(READINESS, timeout)

    async def is_alive(self, *, timeout: Timeout = ...) -> bool:
        """Whether the server works, even if it is not ready. Arguments and errors as for `is_ready`."""
        return await self._calls.ask(LIVENESS, timeout)

    async def wait_until_ready(self, *, timeout: Timeout = ...) -> None:
        """Waits until the server takes requests, whether it has started or not. Arguments and errors as for
        `Client.wait_until_ready`.
        """
        patience = Patience(self._calls.seconds(timeout))
        while True:
            failure = None
            try:
                if await self.is_ready(timeout=patience.left):
                    return
            except (UnavailableError, DeadlineExceededError) as error:
                failure = error
            await asyncio.sleep(patience.pause(failure))

    async def close(self) -> None:
        """Ends the connection. Calls in flight fail with `ClientClosedError`. To be called in the event loop of the
        client; once that is closed, in any, but what was in flight in it never ends, and gRPC may keep its connection.
        """
        await self._calls.close()

    def __del__(self) -> None:
        if (calls := self.__dict__.get("_calls")) is not None and calls.is_connected:
            warnings.warn(f"{self!r} was not closed: its connections stay open", ResourceWarning, 2, self)

    def __repr__(self) -> str:
        closed = ", closed" if self._calls.servers.is_closed else ""
        return f"AsyncClient({self._settings.target.name!r}{closed})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled: make one in each process")

    async def __aenter__(self) -> Self:
        if self._calls.servers.is_closed:
            raise ClientClosedError
        await self._calls.look()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
