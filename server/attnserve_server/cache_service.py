"""The RPCs of `CacheService`. What changes a cache waits for its turn in the engine; the rest is answered at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from grpc import aio

from attnserve import _dtypes
from attnserve.v1 import caches_pb2 as pb
from attnserve_server.caches.operations import Fork, Truncate, describe, read_append
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.work import Host, Use
from attnserve_server.callers import Caller, Callers
from attnserve_server.errors import InvalidRequest, Malformed, NotFound, RequestError
from attnserve_server.service import AttentionService, Context, Read, abort

CACHE_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CacheService"].full_name

M = TypeVar("M", bound=Message)


class CacheService:
    """The service on one host of caches; what waits for its turn goes through the attention service's engine.

    A cache belongs to who created it: for others there is none of that name.
    """

    def __init__(self, host: Host, callers: Callers, attention: AttentionService) -> None:
        self._host = host
        self._callers = callers
        self._attention = attention

    def register(self, server: aio.Server) -> None:
        """Adds the service to a gRPC server that has not started."""
        at_once: dict[str, Callable[[Caller, bytes], Message]] = {
            "Create": self._create,
            "Get": self._get,
            "List": self._list,
            "Delete": self._delete,
        }
        at_its_turn: dict[str, Read] = {
            "Append": lambda caller, message, at, end: read_append(self._host, caller.name, message),
            "Fork": self._fork,
            "Truncate": self._truncate,
        }
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(self._answering(method)) for name, method in at_once.items()
        }
        for name, read in at_its_turn.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(self._attention.handler(name.lower(), read))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CACHE_SERVICE_NAME, handlers),))

    def _answering(self, method: Callable[[Caller, bytes], Message]) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """The handler of an RPC that is answered at once."""

        async def answer(data: bytes, context: Context) -> bytes:
            try:
                return method(self._callers.identify(context), data).SerializeToString()
            except RequestError as error:
                return await abort(context, error)

        return answer

    def _create(self, caller: Caller, data: bytes) -> pb.CacheServiceCreateResponse:
        request = _parsed(pb.CacheServiceCreateRequest, data)
        shape = CacheShape(
            request.num_kv_heads,
            request.head_dim,
            request.value_dim or request.head_dim,
            request.layers or 1,
            _dtypes.name(request.dtype),  # type: ignore[arg-type]  # it is checked there
        )
        ttl = _seconds("ttl", request.ttl) if request.HasField("ttl") else None
        return pb.CacheServiceCreateResponse(
            cache=describe(self._host.store.create(shape, ttl, monotonic(), caller.name))
        )

    def _get(self, caller: Caller, data: bytes) -> pb.CacheServiceGetResponse:
        request = _parsed(pb.CacheServiceGetRequest, data)
        return pb.CacheServiceGetResponse(cache=describe(self._host.store.get(request.name, monotonic(), caller.name)))

    def _list(self, caller: Caller, data: bytes) -> pb.CacheServiceListResponse:
        _parsed(pb.CacheServiceListRequest, data)
        store = self._host.store
        return pb.CacheServiceListResponse(
            caches=map(describe, store.list(caller.name, monotonic())),
            pool_bytes=store.pool_bytes,
            free_bytes=store.free_pages * store.page_bytes,
        )

    def _delete(self, caller: Caller, data: bytes) -> pb.CacheServiceDeleteResponse:
        request = _parsed(pb.CacheServiceDeleteRequest, data)
        if not request.names:
            raise InvalidRequest("names", "at least one name", "none")
        for name in request.names:
            try:
                cache = self._host.store.get(name, monotonic(), caller.name)
            except NotFound:
                continue
            self._host.store.delete(cache)
        return pb.CacheServiceDeleteResponse()

    def _fork(self, caller: Caller, data: bytes, at: int, end: int) -> Fork:
        request = _parsed(pb.CacheServiceForkRequest, data)
        cache = self._host.store.get(request.name, monotonic(), caller.name)
        ttl = _seconds("ttl", request.ttl) if request.HasField("ttl") else None
        return Fork(self._host, (Use(cache, 0, 0, None),), len(data), ttl)

    def _truncate(self, caller: Caller, data: bytes, at: int, end: int) -> Truncate:
        request = _parsed(pb.CacheServiceTruncateRequest, data)
        cache = self._host.store.get(request.name, monotonic(), caller.name)
        expected = request.expected_length if request.HasField("expected_length") else None
        return Truncate(self._host, (Use(cache, 0, 0, expected),), len(data), request.length)


def _parsed(message_type: type[M], data: bytes) -> M:
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise Malformed("", error) from None


def _seconds(field: str, duration: Duration) -> float:
    seconds = float(duration.seconds) + duration.nanos * 1e-9
    if seconds <= 0:
        raise InvalidRequest(field, "a time above 0", f"{seconds:g} s")
    return seconds
