"""Appending to a cache, forking, truncating and describing it: operations that compute nothing, but wait for their turn
all the same. Only an append also waits for the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from google.protobuf.message import DecodeError, Message

from attnserve import _dtypes, _fields, _wire
from attnserve.v1 import caches_pb2 as pb
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.work import CacheHost, CacheWork, Use, cache_named
from attnserve_server.errors import FailedPrecondition, InvalidRequest, Malformed
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.tensors import TensorSpec, float_tensor, shown
from attnserve_server.requests.work import BatchResult, Extent, Phases, RequestResult

if TYPE_CHECKING:
    from attnserve_server.devices import Device

NOTHING = RequestResult(memoryview(b""), None, None)


@dataclass(slots=True, eq=False)
class _Operation(CacheWork):
    """An operation without attention. `begin` makes its reply, before later operations change the cache."""

    reply_field: ClassVar[int] = 0
    group: ClassVar[Hashable] = "cache operation"
    kind: ClassVar[str] = "cache operation"
    priority: ClassVar[int] = 0
    extent: Extent = field(init=False)
    _reply: Message = field(init=False)

    def __post_init__(self) -> None:
        """Counts what it costs: copying an element takes about as long as a multiplication and an addition of it."""
        CacheWork.__post_init__(self)
        self.extent = Extent(flops=0, cost=self.received_bytes // 2, query_tokens=0, reply_bytes=0)

    @property
    def computes(self) -> bool:
        """Nothing is written."""
        return False

    def run_batch(self, device: Device, batch: Sequence[Any]) -> BatchResult:
        """Nothing is left to be done."""
        return BatchResult([NOTHING] * len(batch), 0.0, 0.0, 0.0)

    def encode(self, result: RequestResult, phases: Phases, batch_size: int) -> tuple[list[_fields.Buffer], int]:
        """The encoded reply."""
        data = self._reply.SerializeToString()
        return [data], len(data)


@dataclass(slots=True, eq=False)
class Append(_Operation):
    """Appends keys [Hk, T, D] and values [Hk, T, Dv] to a layer."""

    tensors: dict[str, TensorSpec]
    payloads: list[memoryview]
    length_first: bool

    @property
    def computes(self) -> bool:
        """Keys and values are written."""
        return True

    def begin(self) -> None:
        """Places what is appended."""
        CacheWork.begin(self)
        self._reply = pb.CacheServiceAppendResponse(length=self.lengths[0])

    def run_batch(self, device: Device, batch: Sequence[Append]) -> BatchResult:
        """Writes what is appended."""
        begin = perf_counter()
        for append in batch:
            append.write(device)
        return BatchResult([NOTHING] * len(batch), 0.0, perf_counter() - begin, 0.0)

    def write(self, device: Device) -> None:
        """Brings keys and values to their pages."""
        from attnserve_server.caches.inputs import read_tensor

        key, value = (read_tensor(self.tensors[name], self.payloads, device) for name in ("key", "value"))
        if self.length_first:
            key, value = key.transpose(0, 1), value.transpose(0, 1)
        for placement in self.placements:
            self.host.pages.write(self.uses[0].cache.shape, placement, key, value)


@dataclass(slots=True, eq=False)
class Fork(_Operation):
    """Makes another cache with the same content. A `ttl` of None means the cache's own."""

    ttl: float | None
    request_id: bytes

    def line_up(self, now: float) -> None:
        """Queues the fork: an append behind it will find a shared last page."""
        self._reservation = self.host.store.wait_to_fork(self.uses[0].cache)

    def begin(self) -> None:
        """Forks the cache."""
        cache = self.uses[0].cache
        ttl = cache.ttl if self.ttl is None else self.ttl
        fork = self.host.store.fork(cache, ttl, monotonic(), self.request_id, self._reservation)
        self._reply = pb.CacheServiceForkResponse(cache=describe(self.host, fork))


@dataclass(slots=True, eq=False)
class Truncate(_Operation):
    """Truncates a cache to `length` tokens."""

    length: int
    truncation_id: int
    """The id by which a resend is recognised; 0 if it has none."""

    def line_up(self, now: float) -> None:
        """Queues the truncation: operations behind it will find a shorter cache, if it has the expected length."""
        cache = self.uses[0].cache
        longest = max(cache.coming_length(layer) for layer in range(cache.shape.layers))
        cuts = self.uses[0].expects(longest) and self.truncation_id not in cache.truncations
        self._reservation = self.host.store.wait_to_cut(cache, self.length, cuts)

    def begin(self) -> None:
        """Truncates the cache. Raises InvalidRequest if it has fewer tokens, FailedPrecondition if its length is not
        the expected one or this very request has truncated it before.
        """
        use = self.uses[0]
        longest = max(use.cache.lengths)
        if self.truncation_id in use.cache.truncations:
            message = f"the cache has {longest} tokens, for this truncation was carried out before; nothing was changed"
            found = {"name": use.cache.name, "length": str(longest), "truncated": "true"}
            raise FailedPrecondition(message, "UNEXPECTED_LENGTH", **found)
        if not use.expects(longest):
            raise use.unexpected(longest)
        self.host.store.truncate(use.cache, self.length, self._reservation, self.truncation_id)
        self._reply = pb.CacheServiceTruncateResponse(cache=describe(self.host, use.cache))


@dataclass(slots=True, eq=False)
class Look(_Operation):
    """Describes a cache once all that came before has been done or given up: the description is final. It answers Get.
    It also answers a Fork that is resent when the cache it forks is gone: with the cache that it made the first time.

    It neither holds the cache nor renews its lease: looking keeps nothing alive.
    """

    owner: str | None
    response_type: type[pb.CacheServiceGetResponse | pb.CacheServiceForkResponse]

    @property
    def shares(self) -> bool:
        """It changes nothing."""
        return True

    def enter(self) -> None:
        """Holds nothing."""

    def begin(self) -> None:
        """Looks. Raises NotFound if the cache has gone meanwhile."""
        cache = cache_named(self.host, self.uses[0].cache.name, self.owner)
        self._reply = self.response_type(cache=describe(self.host, cache))

    def leave(self) -> None:
        """Nothing was held."""


def read_append(host: CacheHost, owner: str | None, buffer: bytes, limits: RequestLimits) -> Append:
    """The append that a serialised CacheServiceAppendRequest asks for. Raises RequestError."""
    try:
        header, payloads = _wire.split(pb.CacheServiceAppendRequest, buffer)
        limits.check_header(header)
        message = pb.CacheServiceAppendRequest.FromString(header)
    except DecodeError as error:
        raise Malformed("", error) from None
    cache = cache_named(host, message.name, owner)
    shape = cache.shape
    if message.layer >= shape.layers:
        raise InvalidRequest("layer", f"below {shape.layers}, the layers that the cache has", message.layer)
    tensors = {name: float_tensor(message, name) for name in ("key", "value")}
    limits.check_tensors(tensors)
    key, value = tensors["key"], tensors["value"]
    if value.dtype != key.dtype:
        raise InvalidRequest("value.dtype", f"{_dtypes.name(key.dtype)} as in key", _dtypes.name(value.dtype))
    axis = 0 if message.length_first else 1
    tokens = key.shape[axis] if len(key.shape) == 3 else 0
    for name, spec, width in (("key", key, shape.head_dim), ("value", value, shape.value_dim)):
        expected = (tokens, shape.num_kv_heads, width) if message.length_first else (shape.num_kv_heads, tokens, width)
        if spec.shape != expected:
            count = "T" if name == "key" else tokens  # as many values as keys
            wanted = [count, shape.num_kv_heads, width] if message.length_first else [shape.num_kv_heads, count, width]
            raise InvalidRequest(f"{name}.shape", f"[{', '.join(map(str, wanted))}]", shown(spec))
    expected_length = message.expected_length if message.HasField("expected_length") else None
    return Append(
        host=host,
        uses=(Use(cache, message.layer, tokens, expected_length, message.append_id),),
        received_bytes=len(buffer),
        tensors=tensors,
        payloads=payloads,
        length_first=message.length_first,
    )


def describe(host: CacheHost, cache: Cache) -> pb.Cache:
    """The description of a cache that callers get."""
    shape, now = cache.shape, monotonic()
    message = pb.Cache(
        name=cache.name,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        layers=shape.layers,
        dtype=f"DATA_TYPE_{shape.dtype.upper()}",
        lengths=cache.lengths,
        bytes=cache.bytes,
        shared_bytes=cache.shared_bytes,
        address=host.address,
        alias=cache.alias,
    )
    if cache.ttl is not None:
        message.ttl.FromNanoseconds(round(cache.ttl * 1e9))
        message.remaining.FromNanoseconds(round(max(0.0, cache.expires - now) * 1e9))
    return message
