"""The RPCs of `CacheService`. Those that change or look at a cache wait for their turn in the engine; the rest are
answered at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import monotonic, perf_counter
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from attnserve import _dtypes
from attnserve.v1 import caches_pb2 as pb
from attnserve_server.access.callers import Caller
from attnserve_server.caches.cache import Cache, Origin
from attnserve_server.caches.operations import Append, Fork, Look, Truncate, describe, read_append
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.store import Truncation
from attnserve_server.caches.work import CacheHost, Use, cache_named, check_distinct
from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest, NotFound
from attnserve_server.requests.durations import seconds_of
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.rpc.engine_calls import EngineCalls
from attnserve_server.rpc.reading_turns import ReadingTurn, ReadingTurns
from attnserve_server.rpc.rpcs import Rpcs, parsed

CACHE_SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["CacheService"].full_name

MAX_REQUEST_ID: Final = 64
"""The most bytes of an id by which a request is recognised if it is sent again."""

MAX_ALIAS: Final = 256
"""The most bytes of an alias."""

MAX_PAGE: Final = 1000
"""The most caches in one reply."""
MAX_PAGE_BYTES: Final = 1 << 20
"""About the most bytes of one reply; gRPC's clients take 4 MiB unless they are told otherwise."""
MAX_TOKEN: Final = 20
"""The most characters of a token of a page."""

MAX_AT_ONCE: Final = 256
"""The most caches that one request forks or truncates: as it takes effect at once, the event loop waits for it."""
MAX_LAYERS_AT_ONCE: Final = 16384
"""The most layers that several have together. Each takes some microseconds."""


class CacheService:
    """The service for one host of caches; what waits for its turn there goes through the engine.

    A cache belongs to its creator: for others there is none of that name. `default_ttl`, in seconds, applies where the
    caller gives none; 0 means no ttl. `limits` apply to what is appended.
    """

    def __init__(
        self,
        host: CacheHost,
        calls: EngineCalls,
        rpcs: Rpcs,
        default_ttl: float,
        limits: RequestLimits,
        reading_turns: ReadingTurns,
    ) -> None:
        self._host = host
        self._limits = limits
        self._default_ttl = default_ttl or None
        self._calls = calls
        self._rpcs = rpcs
        self._reading_turns = reading_turns

    def register(self, server: aio.Server) -> None:
        """Adds the service to a gRPC server that has not started."""
        answering, at_its_turn = self._rpcs.answering, self._calls.handler
        handlers = {
            "Create": answering("create", pb.CacheServiceCreateRequest, self._create, "use"),
            "List": answering("list", pb.CacheServiceListRequest, self._list, "use", one_at_a_time=True),
            "Delete": answering("delete", pb.CacheServiceDeleteRequest, self._delete, "use"),
            "Append": at_its_turn("append", self._append),
            "Fork": at_its_turn("fork", self._fork, in_turns=True),
            "Get": at_its_turn("get", self._get),
            "Truncate": at_its_turn("truncate", self._truncate, in_turns=True),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CACHE_SERVICE_NAME, handlers),))

    def _create(self, caller: Caller, request: pb.CacheServiceCreateRequest) -> pb.CacheServiceCreateResponse:
        self._calls.check_open()  # a server that ends would take the cache with it
        shape = CacheShape(
            request.num_kv_heads,
            request.head_dim,
            request.value_dim or request.head_dim,
            request.layers or 1,
            _dtypes.name(request.dtype),  # type: ignore[arg-type]  # CacheShape checks it
        )
        ttl = _ttl(request.ttl) if request.HasField("ttl") else self._default_ttl
        request_id = _checked_id("request_id", request.request_id)
        alias = _checked_alias(request.alias)
        if request_id and alias:
            raise InvalidRequest("request_id", "none beside an alias", f"{len(request_id)} bytes")
        origin = Origin(caller.name, request_id, alias=alias)
        cache = self._host.store.create(shape, ttl, monotonic(), origin)
        return pb.CacheServiceCreateResponse(cache=describe(self._host, cache))

    async def _list(self, caller: Caller, request: pb.CacheServiceListRequest) -> bytes:
        """The reply, serialised piece by piece: there may be thousands of caches, each with hundreds of layers."""
        store = self._host.store
        self._host.expiry.look()  # so that what is free is told
        found = store.list(caller.name, monotonic(), _number(request.page_token))
        caches, size, token = [], 0, ""
        async with self._turn_of(caller) as turn:
            for place, cache in enumerate(found, 1):
                if not cache.gone:
                    described = pb.CacheServiceListResponse(caches=[describe(self._host, cache)])
                    caches.append(described.SerializeToString())
                    size += len(caches[-1])
                is_full = place == min(request.page_size or MAX_PAGE, MAX_PAGE) or size >= MAX_PAGE_BYTES
                if is_full and place < len(found):
                    token = str(cache.number)
                    break
                await turn.rest()
        rest = pb.CacheServiceListResponse(
            pool_bytes=store.pool_bytes, free_bytes=store.free_bytes, next_page_token=token
        )
        return b"".join((*caches, rest.SerializeToString()))

    async def _delete(self, caller: Caller, request: pb.CacheServiceDeleteRequest) -> pb.CacheServiceDeleteResponse:
        store = self._host.store
        if not request.names and not request.request_ids:
            raise InvalidRequest("names", "at least one name or one id", "none")
        deleted = 0
        async with self._turn_of(caller) as turn:
            for place, request_id in enumerate(request.request_ids):
                if not request_id:
                    raise InvalidRequest(f"request_ids[{place}]", "the id of a request", "nothing")
                _checked_id(f"request_ids[{place}]", request_id)
                await turn.rest()
            for name in request.names:
                with suppress(NotFound):
                    store.delete(store.get(name, monotonic(), caller.name))
                    deleted += 1
                await turn.rest()
            for request_id in request.request_ids:
                store.give_up(caller.name, request_id, monotonic())
                await turn.rest()
        return pb.CacheServiceDeleteResponse(deleted=deleted)

    def _turn_of(self, caller: Caller) -> _Turn:
        return _Turn(self._reading_turns.of(caller.share))

    def _append(self, caller: Caller, data: bytes) -> Append:
        return read_append(self._host, caller.name, data, self._limits)

    def _fork(self, caller: Caller, data: bytes) -> Fork | Look:
        request = parsed(pb.CacheServiceForkRequest, data)
        request_id = _checked_id("request_id", request.request_id)
        _check_count("names", len(request.names))
        if len(request.names) > (most := self._host.store.max_caches):
            expected = f"at most {most} caches, which there may be"
            raise InvalidRequest("names", expected, len(request.names), LIMIT_EXCEEDED, limit="max_caches")
        try:
            caches = [self._named(f"names[{i}]", name, caller) for i, name in enumerate(request.names)]
        except NotFound:
            made = self._host.store.made_by(caller.name, request_id, monotonic(), parents=request.names)
            if made is None:
                raise
            return Look(self._host, _looked_at(made), len(data), caller.name, _forked)
        _check_layers("names", caches)
        ttl = _ttl(request.ttl) if request.HasField("ttl") else None
        return Fork(self._host, _looked_at(dict.fromkeys(caches)), len(data), caches, ttl, request_id)

    def _get(self, caller: Caller, data: bytes) -> Look:
        request = parsed(pb.CacheServiceGetRequest, data)
        cache = cache_named(self._host, request.name, caller.name)
        return Look(self._host, _looked_at((cache,)), len(data), caller.name, _got)

    def _truncate(self, caller: Caller, data: bytes) -> Truncate:
        request = parsed(pb.CacheServiceTruncateRequest, data)
        _check_count("truncations", len(request.truncations))
        uses, truncations = [], []
        for i, each in enumerate(request.truncations):
            cache = self._named(f"truncations[{i}].name", each.name, caller)
            if not each.HasField("length"):  # forgotten, it must not empty the cache
                raise InvalidRequest(f"truncations[{i}].length", "a number of tokens", "none")
            expected = each.expected_length if each.HasField("expected_length") else None
            uses.append(Use(cache, 0, 0, expected))
            truncations.append(Truncation(cache, each.length, each.truncation_id))
        check_distinct(uses, "truncations")
        _check_layers("truncations", [use.cache for use in uses])
        return Truncate(self._host, tuple(uses), len(data), truncations)

    def _named(self, field: str, name: str, caller: Caller) -> Cache:
        return cache_named(self._host, name, caller.name, field)


class _Turn:
    """A caller's turn of the event loop, as if it were to read a message; for work that goes on from turn to turn."""

    def __init__(self, turn: ReadingTurn) -> None:
        self._turn = turn
        self._begin = 0.0

    async def __aenter__(self) -> _Turn:
        if not self._turn.is_free:
            await self._turn.wait()
        self._turn.begin()
        self._begin = perf_counter()
        return self

    async def rest(self) -> None:
        """Lets the loop turn for others if the turn is over."""
        seconds = perf_counter() - self._begin
        if self._turn.is_over(seconds):
            try:
                await self._turn.pause(seconds)
            finally:  # to wait is no work
                self._begin = perf_counter()

    async def __aexit__(self, *_: object) -> None:
        self._turn.end(perf_counter() - self._begin)


def _check_count(field: str, count: int) -> None:
    if not 1 <= count <= MAX_AT_ONCE:
        raise InvalidRequest(field, f"from 1 to {MAX_AT_ONCE} caches", count)


def _check_layers(field: str, caches: Sequence[Cache]) -> None:
    if (layers := sum(cache.shape.layers for cache in caches)) > MAX_LAYERS_AT_ONCE and len(caches) > 1:
        raise InvalidRequest(field, f"caches of at most {MAX_LAYERS_AT_ONCE} layers together", f"of {layers}")


def _looked_at(caches: Iterable[Cache]) -> tuple[Use, ...]:
    """Uses that append nothing, and expect no length."""
    return tuple(Use(cache, 0, 0, None) for cache in caches)


def _got(described: Sequence[pb.Cache]) -> pb.CacheServiceGetResponse:
    return pb.CacheServiceGetResponse(cache=described[0])


def _forked(described: Sequence[pb.Cache]) -> pb.CacheServiceForkResponse:
    return pb.CacheServiceForkResponse(caches=described)


def _checked_id(field: str, given: bytes) -> bytes:
    if len(given) > MAX_REQUEST_ID:
        raise InvalidRequest(field, f"at most {MAX_REQUEST_ID} bytes", len(given))
    return given


def _number(page_token: str) -> int:
    """The number of the cache after which a page begins."""
    if not page_token:
        return 0
    if not page_token.isdecimal() or len(page_token) > MAX_TOKEN:
        raise InvalidRequest("page_token", "the next_page_token of an earlier reply", repr(page_token))
    return int(page_token)


def _checked_alias(given: str) -> str:
    if (size := len(given.encode())) > MAX_ALIAS:
        raise InvalidRequest("alias", f"at most {MAX_ALIAS} bytes", size)
    return given


def _ttl(duration: Duration) -> float:
    seconds = seconds_of("ttl", duration)
    if seconds <= 0:
        raise InvalidRequest("ttl", "a time above 0", f"{seconds:g} s")
    return seconds
