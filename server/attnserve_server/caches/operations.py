"""Appending to a cache, forking, truncating and describing it: operations that compute nothing, but wait for their turn
all the same. Only an append also waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from google.protobuf.message import DecodeError, Message

from attnserve import _dtypes, _fields, _wire
from attnserve.v1 import caches_pb2 as pb
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.store import Truncation
from attnserve_server.caches.stored_range import check_few, check_many
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

    def fit(self, longest: int) -> None:
        """Raises InvalidRequest if what is appended does not fit the cache's dtype."""
        check_few(self.tensors, self.payloads, self.uses[0].cache.shape.dtype)

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
        """Brings keys and values to their pages. Raises InvalidRequest."""
        from attnserve_server.caches.inputs import read_tensor

        check_many(self.tensors, self.payloads, self.uses[0].cache.shape.dtype)
        key, value = (read_tensor(self.tensors[name], self.payloads, device) for name in ("key", "value"))
        if self.length_first:
            key, value = key.transpose(0, 1), value.transpose(0, 1)
        for placement in self.placements:
            self.host.pages.write(self.uses[0].cache.shape, placement, key, value)


@dataclass(slots=True, eq=False)
class Fork(_Operation):
    """Makes other caches with the same content as its own, all or none. A `ttl` of None means each cache's own."""

    caches: Sequence[Cache]
    """The caches to fork, each as often as it is to be forked."""
    ttl: float | None
    request_id: bytes

    def line_up(self, now: float) -> None:
        """Queues the forks: an append behind them will find a shared last page."""
        self._reservation = self.host.store.wait_to_fork([use.cache for use in self.uses])

    def begin(self) -> None:
        """Forks the caches."""
        ttls = [cache.ttl if self.ttl is None else self.ttl for cache in self.caches]
        forks = self.host.store.fork(self.caches, ttls, monotonic(), self.request_id, self._reservation)
        self._reply = pb.CacheServiceForkResponse(caches=[describe(self.host, fork) for fork in forks])


@dataclass(slots=True, eq=False)
class Truncate(_Operation):
    """Truncates its caches, all or none."""

    list_field: ClassVar[str] = "truncations"
    truncations: Sequence[Truncation]
    """What is to become of each."""

    def line_up(self, now: float) -> None:
        """Queues the truncations: operations behind them find shorter caches, if these have the expected lengths."""
        foreseen = True
        for use, (cache, length, truncation_id) in zip(self.uses, self.truncations, strict=True):
            longest = max(cache.coming_length(layer) for layer in range(cache.shape.layers))
            is_new = truncation_id not in cache.truncations
            foreseen = foreseen and is_new and use.expects(longest) and length <= longest
        self._reservation = self.host.store.wait_to_cut(self.truncations, foreseen)

    def begin(self) -> None:
        """Truncates the caches. Raises InvalidRequest if one has fewer tokens, FailedPrecondition if the length of one
        is not the expected one or this very request has truncated it before.
        """
        for cache, _, truncation_id in self.truncations:  # of all, before any length: one id shows that all were cut
            if truncation_id in cache.truncations:
                longest, why = max(cache.lengths), "for this truncation was carried out before; nothing was changed"
                found = {"name": cache.name, "length": str(longest), "truncated": "true"}
                message = f"{self.spoken_of(cache)} has {longest} tokens, {why}"
                raise FailedPrecondition(message, "UNEXPECTED_LENGTH", **found)
        for use in self.uses:
            if not use.expects(longest := max(use.cache.lengths)):
                raise use.unexpected(longest, self.spoken_of(use.cache))
        self.host.store.truncate(self.truncations, self._reservation)
        described = [describe(self.host, use.cache) for use in self.uses]
        self._reply = pb.CacheServiceTruncateResponse(caches=described)


@dataclass(slots=True, eq=False)
class Look(_Operation):
    """Describes caches once all that came before has been done or given up: the description is final. It answers Get.
    It also answers a Fork that is resent when the cache it forks is gone: with what it made the first time.

    It neither holds the caches nor renews their leases: looking keeps nothing alive.
    """

    owner: str | None
    reply: Callable[[Sequence[pb.Cache]], Message]
    """Makes the reply of the descriptions."""

    @property
    def shares(self) -> bool:
        """It changes nothing."""
        return True

    def enter(self) -> None:
        """Holds nothing."""

    def begin(self) -> None:
        """Looks. Raises NotFound if a cache has gone meanwhile."""
        caches = [cache_named(self.host, use.cache.name, self.owner) for use in self.uses]
        self._reply = self.reply([describe(self.host, cache) for cache in caches])

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
