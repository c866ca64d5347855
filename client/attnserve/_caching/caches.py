"""Resident caches: keys and values on the server, per layer, for many queries to attend to.

`Cache` and `AsyncCache` are handles to one cache, returned by `create_cache` and `open_cache`; `Caches` and
`AsyncCaches` are the `caches` of the two clients. The threaded and the asyncio classes behave alike.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self, Unpack

from attnserve._caching import plans
from attnserve._caching.creation import Making
from attnserve._caching.deleting import delete, delete_soon
from attnserve._caching.finding import find, find_soon
from attnserve._caching.listing import Listing
from attnserve._caching.pending import pending
from attnserve._caching.state import CacheState, Handle
from attnserve._errors import AttnServeError
from attnserve._requests import arguments, cache_requests
from attnserve._requests.arguments import ArrayLike, ArrayOf, KindT
from attnserve._requests.attend import AttendOptions, encode_attend
from attnserve._requests.cache_requests import AppendLayout, CacheInfo, CachePool
from attnserve._requests.result import AttentionResult
from attnserve._settings.config import Timeout

if TYPE_CHECKING:
    from attnserve._async_client import AsyncClient
    from attnserve._client import Client


class Cache(Handle):
    """A cache on a server, made by `Client.create_cache` or opened by `Client.open_cache`.

        with client.create_cache(num_kv_heads=8, head_dim=64) as cache:
            cache.append(keys, values)
            result = cache.attend(query)                                # attention over a resident memory
            result = cache.attend(query, key, value, causal=True)       # a step of a decoder

    Leaving the `with` deletes it. It may be shared by any number of threads: operations take effect in the order in
    which they are called; those that only read run side by side.

    Nothing is appended twice. An operation that fails with `DeadlineExceededError`, `UnavailableError`, `ServerError`
    or `ProtocolError`, or is cancelled, may still have been carried out; the next one that appends or attends then
    raises `FailedPreconditionError`, with the `actual_length`, and `refresh` adopts that length. The same happens if
    somebody else appends to the cache, unless this client has only read it since it was opened, or found by its alias:
    then each read takes it, and adopts its length, as it is.

    `timeout` is in seconds and includes the wait for other operations on the cache; None for no limit; by default it is
    the client's. Each method raises an `AttnServeError`; in addition to those of every call, `NotFoundError` if the
    cache is gone, and `OverloadedError` with `free_bytes` if there is no room.
    """

    def __init__(self, client: Client, info: CacheInfo, home: str | None, opened: bool = False) -> None:
        super().__init__(CacheState(info, client._calls.turns, home, opened))
        self._client = client
        self._calls = client._calls

    @property
    def bytes(self) -> int:
        """The bytes that it holds, including those that it shares with other caches. Asks the server."""
        return self.info().bytes

    def append(
        self,
        key: ArrayLike,
        value: ArrayLike,
        *,
        layer: int = 0,
        layout: AppendLayout = "heads_first",
        expected_length: int | None = None,
        timeout: Timeout = ...,
    ) -> int:
        """Appends the keys and values of T tokens to one layer, and returns its length.

        - `key`, `value`: ``[Hk, T, D]`` and ``[Hk, T, Dv]``, optionally with a leading batch axis of one; with the
          layout ``"length_first"``, ``[T, Hk, D]`` and ``[T, Hk, Dv]``. Of any floating dtype; stored in the cache's,
          and an error if a finite element is beyond its range.
        - `expected_length`: how many tokens the layer has, as far as the caller knows. If it has another number at this
          append's turn, that is a `FailedPreconditionError`, and nothing is appended. Default: the number after the
          last operation on this `Cache`, whichever thread asked for it.
        """
        seconds = self._calls.seconds(timeout)
        return self._calls.perform(plans.append(self._state, key, value, layer, layout, expected_length, seconds))

    @arguments.takes_options(AttendOptions, encode_attend)
    def attend(
        self,
        query: ArrayOf[KindT],
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[KindT]:
        """Attends to one layer, after appending key and value to it if they are given, in one call.

        Arguments, result and errors are those of `Client.attend`; S is the length of the layer after the append. The
        last query is aligned with the last key, for `causal`, `window` and `alibi_slopes`, unless there is an offset.
        """
        arguments.check_options("attend", options, AttendOptions, "key", "value", "layer", hints=arguments.OF_A_CACHE)
        timeout = self._client._settings.timeout
        return self._calls.perform(
            plans.attend(self._calls.turns, self, layer, query, key, value, timeout, options, "layer")
        )

    def fork(self, ttl: float | None = None, *, timeout: Timeout = ...) -> Cache:
        """Makes another cache with the same content, in constant time: existing content is shared, and what either
        appends is its own. `ttl` as in `Client.create_cache`, by default that of this cache.
        """
        return _fork(self._client, (self._state,), ttl, timeout)[0]

    def truncate(self, length: int, *, timeout: Timeout = ...) -> None:
        """Cuts the cache off at a length, as if what came after had never been appended. Layers that are shorter stay
        as they are; `InvalidRequestError` if all are.
        """
        self._calls.perform(plans.truncate(self._state, length, self._calls.seconds(timeout)))

    def info(self, *, timeout: Timeout = ...) -> CacheInfo:
        """The cache's current state, as the server reports it."""
        return self._calls.ask(cache_requests.get(self._state.info), timeout, self._state.home)

    def refresh(self, *, timeout: Timeout = ...) -> CacheInfo:
        """The cache's current state, as the server reports it; its lengths are the expected ones from now on."""
        return self._calls.perform(plans.refresh(self._state, self._calls.seconds(timeout)))

    def delete(self, *, timeout: Timeout = ...) -> None:
        """Deletes the cache, after all earlier operations on it. If it is gone already, that is no error."""
        self._calls.perform(plans.delete([self._state], self._calls.seconds(timeout)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # An exception from the body matters more than a failure to delete, perhaps because the server is gone.
        with suppress(*() if kind is None else (AttnServeError,)):
            self.delete()


class AsyncCache(Handle):
    """A cache on a server, for asyncio: `Cache`, awaited.

        async with client.create_cache(num_kv_heads=8, head_dim=64) as cache:
            result = await cache.attend(query, key, value, causal=True)

    Leaving the `async with` deletes it, also when the task is cancelled. `info` says how many bytes it holds.
    """

    def __init__(self, client: AsyncClient, info: CacheInfo, home: str | None, opened: bool = False) -> None:
        super().__init__(CacheState(info, client._calls.turns, home, opened))
        self._client = client
        self._calls = client._calls

    async def append(
        self,
        key: ArrayLike,
        value: ArrayLike,
        *,
        layer: int = 0,
        layout: AppendLayout = "heads_first",
        expected_length: int | None = None,
        timeout: Timeout = ...,
    ) -> int:
        """Appends the keys and values of T tokens to one layer, and returns its length, as `Cache.append` does."""
        seconds = self._calls.seconds(timeout)
        plan = plans.append(self._state, key, value, layer, layout, expected_length, seconds)
        return await self._calls.carry_out(plan)

    @arguments.takes_options(AttendOptions, encode_attend)
    async def attend(
        self,
        query: ArrayOf[KindT],
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[KindT]:
        """Attends to one layer, after appending key and value to it if they are given, in one call."""
        arguments.check_options("attend", options, AttendOptions, "key", "value", "layer", hints=arguments.OF_A_CACHE)
        timeout = self._client._settings.timeout
        return await self._calls.carry_out(
            plans.attend(self._calls.turns, self, layer, query, key, value, timeout, options, "layer")
        )

    @pending
    async def fork(self, ttl: float | None = None, *, timeout: Timeout = ...) -> AsyncCache:
        """Makes another cache with the same content, in constant time, as `Cache.fork` does. It can be entered as with
        `AsyncClient.create_cache`.
        """
        return (await _fork_soon(self._client, (self._state,), ttl, timeout))[0]

    async def truncate(self, length: int, *, timeout: Timeout = ...) -> None:
        """Cuts the cache off at a length, as `Cache.truncate` does."""
        await self._calls.carry_out(plans.truncate(self._state, length, self._calls.seconds(timeout)))

    async def info(self, *, timeout: Timeout = ...) -> CacheInfo:
        """The cache's current state, as the server reports it."""
        return await self._calls.ask(cache_requests.get(self._state.info), timeout, self._state.home)

    async def refresh(self, *, timeout: Timeout = ...) -> CacheInfo:
        """The cache's current state, as the server reports it; its lengths are the expected ones from now on."""
        return await self._calls.carry_out(plans.refresh(self._state, self._calls.seconds(timeout)))

    async def delete(self, *, timeout: Timeout = ...) -> None:
        """Deletes the cache, after all earlier operations on it. If it is gone already, that is no error."""
        await self._calls.carry_out(plans.delete([self._state], self._calls.seconds(timeout)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with suppress(*() if kind is None else (AttnServeError,)):  # as in `Cache`
            try:
                await self.delete()
            except CancelledError:  # which nobody would do again
                self._calls.tell(cache_requests.delete([self.name]), self._state.home)
                raise


class Caches:
    """The caller's caches, on all servers that the client knows: `Client.caches`.

    `timeout` is in seconds for each server, None for no limit; by default it is the client's. Each method raises an
    `AttnServeError`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._calls = client._calls

    def list(self, *, timeout: Timeout = ...) -> tuple[CacheInfo, ...]:
        """All caches of the caller, by server and in order of creation. Renews no lease."""
        return self.pool(timeout=timeout).caches

    def pool(self, *, timeout: Timeout = ...) -> CachePool:
        """All caches of the caller, and how full the pools of all servers are together. Renews no lease."""
        homes = self._calls.servers.homes(self._calls.seconds(timeout))
        return cache_requests.together([self._pages(timeout, home) for home in homes])

    def _pages(self, timeout: Timeout, home: str | None) -> Sequence[CachePool]:
        listing = Listing(self._calls.seconds(timeout))
        while not listing.is_complete:
            listing.add(self._calls.ask(listing.rpc, listing.left, home, given=listing.timeout))
        return listing.pages

    def fork(
        self, caches: Cache | Iterable[Cache], ttl: float | None = None, *, timeout: Timeout = ...
    ) -> tuple[Cache, ...]:
        """Makes other caches with the same content, in one request, all or none: one for each that is given, in their
        order, and several of a cache that is given several times (as the beams of a search go on). At most 256, of at
        most 16,384 layers together, on one server. Otherwise everything is as with `Cache.fork`.
        """
        return _fork(self._client, plans.to_fork(self._calls.turns, caches), ttl, timeout)

    def truncate(
        self,
        caches: Cache | Iterable[Cache],
        lengths: int | Iterable[int],
        *,
        timeout: Timeout = ...,
    ) -> None:
        """Cuts caches off, in one request, all or none: each at a length of its own (as the tokens of a draft model are
        accepted or not), or all at one. At most 256, of at most 16,384 layers together, on one server, each once.
        Otherwise everything is as with `Cache.truncate`.
        """
        seconds = self._calls.seconds(timeout)
        self._calls.perform(plans.truncate_all(self._calls.turns, caches, lengths, seconds))

    def get(self, name: str, *, timeout: Timeout = ...) -> CacheInfo:
        """Describes one cache. Does not renew its lease. `NotFoundError` if the caller has no cache of that name, and
        another error if a server that might have it is out of reach.
        """
        return find(self._calls, name, timeout)[0]

    def delete(self, caches: Cache | str | Iterable[Cache | str], *, timeout: Timeout = ...) -> int:
        """Deletes caches: one, several or none. Returns how many were there, and are deleted now: it is no error if
        one is gone already. (If a reply is lost and the request sent again, it is fewer: they are gone by then. A
        server that is older than this client counts none.)

        - A cache of this client is deleted on its server, after all earlier operations on it.
        - A cache's name is sent to every server, and deleted at once. What is no cache's name is ignored: an alias is
          none (`Client.create_cache` finds the cache of an alias).

        Many are sent in portions of 500, each with the `timeout`. No server is left out because of what others answer.
        If a portion fails at a server, its further ones are not sent there, and once all other servers have been asked,
        the error is raised: of several, the first that says that one is out of reach, or else the last.
        """
        return delete(self._calls, caches, timeout)


class AsyncCaches:
    """The caller's caches on all servers: `AsyncClient.caches`. Everything is as with `Caches`, awaited."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._calls = client._calls

    async def list(self, *, timeout: Timeout = ...) -> tuple[CacheInfo, ...]:
        """All caches of the caller, by server and in order of creation. Renews no lease."""
        return (await self.pool(timeout=timeout)).caches

    async def pool(self, *, timeout: Timeout = ...) -> CachePool:
        """All caches of the caller, and how full the pools of all servers are together. Renews no lease."""
        homes = await self._calls.servers.homes_soon(self._calls.seconds(timeout))
        return cache_requests.together([await self._pages(timeout, home) for home in homes])

    async def _pages(self, timeout: Timeout, home: str | None) -> Sequence[CachePool]:
        listing = Listing(self._calls.seconds(timeout))
        while not listing.is_complete:
            listing.add(await self._calls.ask(listing.rpc, listing.left, home, given=listing.timeout))
        return listing.pages

    async def fork(
        self, caches: AsyncCache | Iterable[AsyncCache], ttl: float | None = None, *, timeout: Timeout = ...
    ) -> tuple[AsyncCache, ...]:
        """Makes other caches with the same content, in one request, all or none, as `Caches.fork` does."""
        return await _fork_soon(self._client, plans.to_fork(self._calls.turns, caches), ttl, timeout)

    async def truncate(
        self,
        caches: AsyncCache | Iterable[AsyncCache],
        lengths: int | Iterable[int],
        *,
        timeout: Timeout = ...,
    ) -> None:
        """Cuts caches off, in one request, all or none, as `Caches.truncate` does."""
        seconds = self._calls.seconds(timeout)
        await self._calls.carry_out(plans.truncate_all(self._calls.turns, caches, lengths, seconds))

    async def get(self, name: str, *, timeout: Timeout = ...) -> CacheInfo:
        """Describes one cache. Does not renew its lease. `NotFoundError` if the caller has no cache of that name, and
        another error if a server that might have it is out of reach.
        """
        return (await find_soon(self._calls, name, timeout))[0]

    async def delete(self, caches: AsyncCache | str | Iterable[AsyncCache | str], *, timeout: Timeout = ...) -> int:
        """Deletes caches: one, several or none, as `Caches.delete` does, and returns how many were there."""
        return await delete_soon(self._calls, caches, timeout)


def _fork(client: Client, states: Sequence[CacheState], ttl: float | None, timeout: Timeout) -> tuple[Cache, ...]:
    """Forks caches of one server."""
    calls, home = client._calls, states[0].home
    rpc, seconds = cache_requests.fork([state.info for state in states], ttl), calls.seconds(timeout)
    with Making(rpc, calls.tell) as making:
        making.at(home)
        infos = calls.perform(plans.fork(states, rpc, seconds))
        forks = tuple(Cache(client, info, home) for info in infos)
        making.done()
    return forks


async def _fork_soon(
    client: AsyncClient, states: Sequence[CacheState], ttl: float | None, timeout: Timeout
) -> tuple[AsyncCache, ...]:
    """The same for asyncio."""
    calls, home = client._calls, states[0].home
    rpc, seconds = cache_requests.fork([state.info for state in states], ttl), calls.seconds(timeout)
    with Making(rpc, calls.tell) as making:
        making.at(home)
        infos = await calls.carry_out(plans.fork(states, rpc, seconds))
        forks = tuple(AsyncCache(client, info, home) for info in infos)
        making.done()
    return forks
