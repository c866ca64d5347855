"""A minimal peer that keeps caches, and loses replies when it is told to.

The SDK's caches are tested against it: keys and values in NumPy arrays, attention in float64, and a script of
operations that are carried out and whose replies are then lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from peers import SERVICE, peer

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import caches_pb2, tensor_pb2

CACHE_SERVICE = "attnserve.v1.CacheService"
PAGE = 10
"""How many caches it lists in one reply."""

Array = np.ndarray[Any, Any]


class Refusal(Exception):
    """A request that the peer does not carry out."""

    def __init__(self, code: grpc.StatusCode, reason: str = "", **metadata: str) -> None:
        super().__init__(code.name)
        self.status = status_pb2.Status(code=code.value[0], message="because")
        self.status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason or code.name, metadata=metadata))


class LostReply(Exception):
    """The connection breaks before the reply is sent."""


class Kept:
    """A cache: keys [Hk, T, D] and values [Hk, T, Dv] of each layer."""

    def __init__(self, info: caches_pb2.Cache, layers: list[tuple[Array, Array]]) -> None:
        self.info = info
        self.layers = layers
        self.appends: list[dict[int, int]] = [{} for _ in layers]
        """By the id of an append, the length after it; for each layer, all appends that are still there."""
        self.truncations: set[int] = set()
        """The ids of all truncations."""

    def describe(self) -> caches_pb2.Cache:
        info = caches_pb2.Cache()
        info.CopyFrom(self.info)
        info.lengths[:] = [key.shape[1] for key, _ in self.layers]
        info.bytes = 8 * sum(key.size + value.size for key, value in self.layers)
        return info

    def append(self, layer: int, key: Array, value: Array, append_id: int = 0) -> None:
        keys, values = self.layers[layer]
        self.layers[layer] = np.concatenate([keys, key], 1), np.concatenate([values, value], 1)
        if append_id:
            self.appends[layer][append_id] = self.layers[layer][0].shape[1]


class Keeper:
    """The peer. Caches outlive its server, so that a connection can break without losing them."""

    def __init__(self) -> None:
        self.caches: dict[str, Kept] = {}
        self.asked: list[tuple[str, Any]] = []
        """Every request with its method, in the order in which they were carried out or refused."""
        self.lose: list[str] = []
        """Methods whose next replies are lost: the connection breaks after they have been carried out."""
        self.before: dict[str, Callable[[Any], object]] = {}
        """By method, what to do before a request is carried out."""
        self.after: dict[str, Callable[[Any, grpc.ServicerContext], object]] = {}
        """By method, what to do with a reply before it is sent."""
        self._made: dict[bytes | str, list[Kept]] = {}
        """By request id, or by alias."""
        self._lock = threading.Lock()
        self._names = iter(f"cache-{number}" for number in range(10_000))

    @contextlib.contextmanager
    def serve(self, port: int = 0) -> Iterator[str]:
        """Serves on a port and yields the address."""
        methods: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "Create": (caches_pb2.CacheServiceCreateRequest, self._create),
            "Append": (caches_pb2.CacheServiceAppendRequest, self._append),
            "Fork": (caches_pb2.CacheServiceForkRequest, self._fork),
            "Truncate": (caches_pb2.CacheServiceTruncateRequest, self._truncate),
            "Get": (caches_pb2.CacheServiceGetRequest, self._get),
            "List": (caches_pb2.CacheServiceListRequest, self._list),
            "Delete": (caches_pb2.CacheServiceDeleteRequest, self._delete),
        }
        unary = {name: self._unary(name, *method) for name, method in methods.items()}
        operations = {
            "Attend": self._unary("Attend", pb.AttendRequest, self._attend),
            "Apply": self._unary("Apply", pb.ApplyRequest, self._apply),
        }
        with peer(self._stream, None, {CACHE_SERVICE: unary, SERVICE: operations}, port=port) as address:
            yield address

    def methods(self) -> list[str]:
        """The methods of all requests."""
        return [method for method, _ in self.asked]

    def _answer(self, name: str, request: Any, act: Callable[[Any], Any], context: grpc.ServicerContext) -> Any:
        """The reply. Raises Refusal, or LostReply once the request has been carried out or refused."""
        self.before.get(name, bool)(request)
        with self._lock:
            self.asked.append((name, request))
            try:
                answer = act(request)
            finally:
                if name in self.lose:
                    self.lose.remove(name)
                    raise LostReply
        if name in self.after:
            self.after[name](answer, context)
        return answer

    def _unary(self, name: str, request_type: Any, act: Callable[[Any], Any]) -> Any:
        def method(message: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                answer = self._answer(name, request_type.FromString(message), act, context)
                return bytes(answer.SerializeToString())
            except LostReply:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            except Refusal as refusal:
                code = next(code for code in grpc.StatusCode if code.value[0] == refusal.status.code)
                context.set_trailing_metadata((("grpc-status-details-bin", refusal.status.SerializeToString()),))
                context.abort(code, refusal.status.message)

        return method

    def _stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            for call in pb.AttendStreamRequest.FromString(message).calls:
                reply = pb.AttendStreamReply(id=call.id)
                try:
                    if call.WhichOneof("operation") == "apply":
                        reply.apply.MergeFrom(self._answer("Apply", call.apply, self._apply, context))
                    else:
                        reply.attend.MergeFrom(self._answer("Attend", call.attend, self._attend, context))
                except LostReply:
                    context.abort(grpc.StatusCode.INTERNAL, "the connection broke")
                except Refusal as refusal:
                    reply.error.CopyFrom(refusal.status)
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    def _find(self, name: str) -> Kept:
        if name not in self.caches:
            raise Refusal(grpc.StatusCode.NOT_FOUND)
        return self.caches[name]

    def _create(self, request: caches_pb2.CacheServiceCreateRequest) -> Message:
        assert bool(request.request_id) != bool(request.alias)
        if (made := self._made.get(request.request_id or request.alias)) is not None:
            return caches_pb2.CacheServiceCreateResponse(cache=made[0].describe())
        info = caches_pb2.Cache(
            name=next(self._names),
            num_kv_heads=request.num_kv_heads,
            head_dim=request.head_dim,
            value_dim=request.value_dim or request.head_dim,
            layers=request.layers or 1,
            dtype=request.dtype,
            alias=request.alias,
        )
        if request.HasField("ttl"):
            info.ttl.CopyFrom(request.ttl)
            info.remaining.CopyFrom(request.ttl)
        empty = np.empty((info.num_kv_heads, 0, info.head_dim)), np.empty((info.num_kv_heads, 0, info.value_dim))
        kept = self.caches[info.name] = Kept(info, [empty] * info.layers)
        self._made[request.request_id or request.alias] = [kept]
        return caches_pb2.CacheServiceCreateResponse(cache=kept.describe())

    def _append(self, request: caches_pb2.CacheServiceAppendRequest) -> Message:
        kept = self._find(request.name)
        assert request.HasField("expected_length")
        assert request.append_id
        self._check(kept, request.layer, request)
        key, value = array(request.key), array(request.value)
        if request.length_first:
            key, value = key.swapaxes(0, 1), value.swapaxes(0, 1)
        kept.append(request.layer, key, value, request.append_id)
        return caches_pb2.CacheServiceAppendResponse(length=kept.layers[request.layer][0].shape[1])

    def _check(self, kept: Kept, layer: int, expects: Any) -> None:
        length = kept.layers[layer][0].shape[1]
        if length != expects.expected_length:
            known = {"appended": "true"} if expects.append_id in kept.appends[layer] else {}
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, length=str(length), **known)

    def _fork(self, request: caches_pb2.CacheServiceForkRequest) -> Message:
        if (made := self._made.get(request.request_id)) is not None:
            return caches_pb2.CacheServiceForkResponse(caches=[fork.describe() for fork in made])
        forks = []
        for kept in [self._find(name) for name in request.names]:
            info = kept.describe()
            info.name = next(self._names)
            if request.HasField("ttl"):
                info.ttl.CopyFrom(request.ttl)
            self.caches[info.name] = fork = Kept(info, list(kept.layers))
            forks.append(fork)
        self._made[request.request_id] = forks
        return caches_pb2.CacheServiceForkResponse(caches=[fork.describe() for fork in forks])

    def _truncate(self, request: caches_pb2.CacheServiceTruncateRequest) -> Message:
        for each in request.truncations:
            kept = self._find(each.name)
            longest = max(kept.describe().lengths)
            assert each.HasField("length")
            assert each.HasField("expected_length")
            assert each.truncation_id
            if each.truncation_id in kept.truncations:
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, length=str(longest), truncated="true")
            if longest != each.expected_length:
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, length=str(longest))
            if longest < each.length:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT)
        return caches_pb2.CacheServiceTruncateResponse(caches=map(self._cut, request.truncations))

    def _cut(self, truncation: caches_pb2.Truncation) -> caches_pb2.Cache:
        kept, length = self._find(truncation.name), truncation.length
        kept.layers = [(key[:, :length], value[:, :length]) for key, value in kept.layers]
        kept.appends = [
            {append_id: end for append_id, end in appends.items() if end <= length} for appends in kept.appends
        ]
        kept.truncations.add(truncation.truncation_id)
        return kept.describe()

    def _get(self, request: caches_pb2.CacheServiceGetRequest) -> Message:
        return caches_pb2.CacheServiceGetResponse(cache=self._find(request.name).describe())

    def _list(self, request: caches_pb2.CacheServiceListRequest) -> Message:
        first = int(request.page_token or 0)
        caches = [kept.describe() for kept in self.caches.values()]
        return caches_pb2.CacheServiceListResponse(
            caches=caches[first : first + PAGE],
            pool_bytes=1 << 20,
            free_bytes=1000,
            next_page_token=str(first + PAGE) if first + PAGE < len(caches) else "",
        )

    def _delete(self, request: caches_pb2.CacheServiceDeleteRequest) -> Message:
        deleted = sum(self.caches.pop(name, None) is not None for name in request.names)
        for request_id in request.request_ids:
            for made in self._made.pop(request_id, ()):
                self.caches.pop(made.info.name, None)
        return caches_pb2.CacheServiceDeleteResponse(deleted=deleted)

    def _attend(self, request: pb.AttendRequest) -> Message:
        """One query head for each key/value head, rank 4, heads first; causal is bottom right."""
        kept = [self._find(reference.name) for reference in request.caches]
        for cache, reference in zip(kept, request.caches, strict=True):
            assert reference.HasField("expected_length")
            assert bool(reference.append_id) == request.HasField("key")
            self._check(cache, reference.layer, reference)
        if request.HasField("key"):
            for cache, reference, key, value in zip(
                kept, request.caches, array(request.key), array(request.value), strict=True
            ):
                cache.append(reference.layer, key, value, reference.append_id)
        query = array(request.query)
        outputs = [
            attention(query[index], *cache.layers[reference.layer], request.causal)
            for index, (cache, reference) in enumerate(zip(kept, request.caches, strict=True))
        ]
        answer = pb.AttendResponse(batch_size=1)
        answer.cache_lengths.extend(
            cache.layers[reference.layer][0].shape[1] for cache, reference in zip(kept, request.caches, strict=True)
        )
        fill(answer.output, np.stack(outputs))
        return answer

    def _apply(self, request: pb.ApplyRequest) -> Message:
        """A layer whose keys and values are its input; the output is the sum of all keys, in every row."""
        kept = [self._find(reference.name) for reference in request.caches]
        for cache, reference in zip(kept, request.caches, strict=True):
            assert reference.HasField("expected_length")
            assert reference.append_id
            self._check(cache, 0, reference)
        input = array(request.input)
        lengths = np.frombuffer(request.lengths.data, np.int64) if request.HasField("lengths") else None
        output = np.zeros_like(input)
        for index, (cache, reference) in enumerate(zip(kept, request.caches, strict=True)):
            rows = input[index] if lengths is None else input[index][: lengths[index]]
            for layer in range(len(cache.layers)):
                if len(rows):
                    cache.append(layer, rows[None], rows[None], reference.append_id)
            output[index] = cache.layers[0][0].sum((0, 1))
        answer = pb.ApplyResponse(batch_size=1, layer_version=1)
        answer.cache_lengths.extend(cache.layers[0][0].shape[1] for cache in kept)
        fill(answer.output, output)
        return answer


def attention(query: Array, key: Array, value: Array, causal: bool) -> Array:
    """[H, Lq, D], [H, S, D] and [H, S, Dv] to [H, Lq, Dv], in float64."""
    scores = query.astype(np.float64) @ key.astype(np.float64).swapaxes(1, 2) / sqrt(query.shape[2])
    if causal:
        positions = np.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1]
        scores[:, np.arange(key.shape[1]) > positions] = -np.inf
    weights = np.exp(scores - scores.max(2, keepdims=True))
    return np.asarray(weights / weights.sum(2, keepdims=True) @ value)


def array(tensor: tensor_pb2.Tensor) -> Array:
    """A float32 tensor's elements."""
    assert tensor.dtype == tensor_pb2.DATA_TYPE_FLOAT32
    return np.frombuffer(tensor.data, np.float32).reshape(tuple(tensor.shape))


def fill(tensor: tensor_pb2.Tensor, values: Array) -> None:
    """Puts values into a float32 tensor."""
    tensor.dtype = tensor_pb2.DATA_TYPE_FLOAT32
    tensor.shape.extend(values.shape)
    tensor.data = values.astype(np.float32).tobytes()
