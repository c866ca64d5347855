"""The description of a cache, and the requests of `CacheService` as values.

In: names, numbers, keys and values, as the caller passed them. Out: an `Rpc` for either client to send, which returns a
`CacheInfo`, a `CachePool`, a number or nothing.

All may be sent again if it is unknown whether the server has run them: an append and a truncation state the length that
they expect; they, a create and a fork have an id by which the server recognises them, and the server can be told that
nobody waits for what a create or a fork makes; the others only read or delete.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from google.protobuf.duration_pb2 import Duration

from attnserve import _dtypes
from attnserve._errors import InvalidRequestError, ProtocolError
from attnserve._fields import Buffer
from attnserve._requests import arguments, call
from attnserve._requests import arrays as _arrays
from attnserve._requests.arguments import ArrayLike
from attnserve._requests.arrays import Array
from attnserve._rpc import Rpc
from attnserve.v1 import caches_pb2 as pb
from attnserve.v1 import tensor_pb2

_SERVICE: Final = "/attnserve.v1.CacheService/"

_LONGEST_TTL: Final = 315_576_000_000
"""Seconds: ten thousand years, the maximum of a protobuf Duration."""

_ID_BYTES: Final = 16
"""The length of the random id by which a server recognises a repeated request."""

_DTYPES: Final[dict[Any, tensor_pb2.DataType]] = {
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
}

_SHOWN: Final = 4
"""The characters of a cache's name that are shown, of 24: enough to tell one's own caches apart, not to open one."""

AppendLayout: TypeAlias = Literal["heads_first", "length_first"]

_LENGTH_AXES: Final[dict[Any, int]] = {"heads_first": 1, "length_first": 0}
"""The token axis of appended keys, by layout."""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The description of a cache by its server.

    - `name`: its name, which nobody can guess.
    - `num_kv_heads`: the heads of its keys and values.
    - `head_dim`: the width of each key head.
    - `value_dim`: the width of each value head.
    - `layers`: how many layers it has.
    - `dtype`: the stored dtype, such as ``float32``.
    - `lengths`: the number of tokens in each layer.
    - `bytes`: the bytes that it holds, including those that it shares with other caches.
    - `shared_bytes`: of these, the bytes that it shares.
    - `ttl`: how long it lives after its last use, in seconds; None: until it is deleted.
    - `remaining`: how much of that is left, in seconds; None without a ttl.
    - `address`: where the server that holds it can be reached; None if it does not say.
    - `alias`: the name that its caller gave it; None if it has none.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    value_dim: int
    layers: int
    dtype: str
    lengths: tuple[int, ...]
    bytes: int
    shared_bytes: int
    ttl: float | None
    remaining: float | None
    address: str | None = None
    alias: str | None = None

    def __repr__(self) -> str:
        rest = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)[1:])
        return f"CacheInfo(name={shown_name(self.name)}, {', '.join(rest)})"


def shown_name(name: str) -> str:
    """A cache's name for people and logs, cut short: where callers are not identified, the whole name is a secret."""
    return repr(name[:_SHOWN] + "…")


@dataclass(frozen=True, slots=True)
class CachePool:
    """The caller's caches, and how full the server's pool is.

    - `caches`: the caches, in order of creation.
    - `bytes`: the bytes of the pool.
    - `free_bytes`: of these, the bytes that are free and not promised to appends in flight.
    """

    caches: tuple[CacheInfo, ...]
    bytes: int
    free_bytes: int


def together(servers: Sequence[Sequence[CachePool]]) -> CachePool:
    """The pools of several servers as one: of each, the pages, of which the last says how full it is."""
    caches = itertools.chain.from_iterable(pool.caches for pages in servers for pool in pages)
    last = [pages[-1] for pages in servers]
    return CachePool(tuple(caches), sum(pool.bytes for pool in last), sum(pool.free_bytes for pool in last))


def create(
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    layers: int,
    dtype: Any,
    ttl: float | None,
    alias: str | None = None,
) -> Rpc[pb.CacheServiceCreateResponse, CacheInfo]:
    """Creates a cache, or finds the one of an alias. The dtype may be a name, or NumPy's or torch's."""
    request = pb.CacheServiceCreateRequest(
        num_kv_heads=arguments.count("num_kv_heads", num_kv_heads, 1, 32),
        head_dim=arguments.count("head_dim", head_dim, 1, 32),
        value_dim=0 if value_dim is None else arguments.count("value_dim", value_dim, 1, 32),
        layers=arguments.count("layers", layers, 1, 32),
        dtype=arguments.choice("dtype", _DTYPES, _dtype_name(dtype)),
        ttl=_duration(ttl),
        # A repeated request is recognised by the one or the other; what has an alias is never given up.
        request_id=secrets.token_bytes(_ID_BYTES) if alias is None else b"",
        alias="" if alias is None else arguments.text("alias", alias),
    )
    expected = {
        "num_kv_heads": request.num_kv_heads,
        "head_dim": request.head_dim,
        "value_dim": request.value_dim or request.head_dim,
        "layers": request.layers,
        "dtype": _dtypes.name(request.dtype),
        "alias": alias,
    }
    longest = 0 if alias is None else None
    return Rpc(_SERVICE + "Create", request, pb.CacheServiceCreateResponse, partial(_only_cache, expected, longest))


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype, which may also be a NumPy class such as ``numpy.float16``."""
    if isinstance(dtype, type):
        if issubclass(dtype, np.generic):
            return dtype.__name__  # NumPy 1 takes `numpy.floating` for float64
        with suppress(TypeError):  # a class that has no dtype
            dtype = np.dtype(dtype)
    return str(dtype).removeprefix("torch.")


def append(
    name: str, layer: int, expected_length: int, tokens: int, append_id: int, fields: Sequence[Buffer]
) -> Rpc[pb.CacheServiceAppendResponse, int]:
    """Appends the keys and values of some tokens, as fields made by `appended`; the answer is the layer's length."""
    request = pb.CacheServiceAppendRequest(name=name, layer=layer, expected_length=expected_length, append_id=append_id)
    read = partial(_length, expected_length + tokens)
    return Rpc(_SERVICE + "Append", request, pb.CacheServiceAppendResponse, read, fields)


def appended(key: ArrayLike, value: ArrayLike, layout: AppendLayout) -> tuple[int, Sequence[Buffer]]:
    """The number of tokens in keys and values, and the fields of an append that hold them."""
    axis: int = arguments.choice("layout", _LENGTH_AXES, layout)
    arrays = [(field, _one_sequence(field, array)) for field, array in (("key", key), ("value", value))]
    request_type = pb.CacheServiceAppendRequest
    header = call.header(request_type, call.tensors(arrays), length_first=layout == "length_first")
    fields, _ = call.assembled(request_type, header, arrays)
    return arrays[0][1].shape[axis], fields


def _one_sequence(field: str, value: ArrayLike) -> Array:
    """A floating array of rank 3, made from one of rank 3, or of rank 4 with a batch of one."""
    array = _arrays.floating(field, value)
    shape = array.shape
    if len(shape) == 4 and shape[0] == 1:
        return array._replace(shape=shape[1:])
    if len(shape) != 3:
        raise InvalidRequestError(
            f"{field}: expected rank 3, or rank 4 with a batch of 1, found {list(shape)}", field=field
        )
    return array


def fork(caches: Sequence[CacheInfo], ttl: float | None) -> Rpc[pb.CacheServiceForkResponse, list[CacheInfo]]:
    """Makes other caches with the same content, as many as are given."""
    names = [cache.name for cache in caches]
    request = pb.CacheServiceForkRequest(names=names, ttl=_duration(ttl), request_id=secrets.token_bytes(_ID_BYTES))
    return Rpc(_SERVICE + "Fork", request, pb.CacheServiceForkResponse, partial(_forks, caches))


class Truncation(NamedTuple):
    """Where to cut off a cache."""

    cache: CacheInfo
    length: int
    expected_length: int
    """That of its longest layer."""
    truncation_id: int


def truncate(truncations: Sequence[Truncation]) -> Rpc[pb.CacheServiceTruncateResponse, list[CacheInfo]]:
    """Truncates all layers of caches, each of which is given once."""
    messages = [
        pb.Truncation(name=cache.name, length=length, expected_length=expected, truncation_id=truncation_id)
        for cache, length, expected, truncation_id in truncations
    ]
    request = pb.CacheServiceTruncateRequest(truncations=messages)
    return Rpc(_SERVICE + "Truncate", request, pb.CacheServiceTruncateResponse, partial(_truncated, truncations))


def get(cache: str | CacheInfo) -> Rpc[pb.CacheServiceGetResponse, CacheInfo]:
    """Asks for the description of a cache, by its name, or by an earlier description."""
    name, shape = (cache.name, _shape(cache)) if isinstance(cache, CacheInfo) else (arguments.text("name", cache), {})
    read = partial(_only_cache, {"name": name, **shape}, None)
    return Rpc(_SERVICE + "Get", pb.CacheServiceGetRequest(name=name), pb.CacheServiceGetResponse, read)


class Page(NamedTuple):
    """Some caches of the caller on a server, how full its pool is, and the token of the next page; empty: no more."""

    pool: CachePool
    token: str


def page(token: str = "") -> Rpc[pb.CacheServiceListResponse, Page]:
    """Asks for the caller's caches: for the first ones, or for those of the next page."""
    return Rpc(_SERVICE + "List", pb.CacheServiceListRequest(page_token=token), pb.CacheServiceListResponse, _page)


def delete(names: Sequence[str]) -> Rpc[pb.CacheServiceDeleteResponse, int]:
    """Deletes caches, in one request; the answer is how many were there."""
    request = pb.CacheServiceDeleteRequest(names=names)
    return Rpc(_SERVICE + "Delete", request, pb.CacheServiceDeleteResponse, partial(_deleted, len(names)))


def give_up(made: Rpc[Any, Any]) -> Rpc[pb.CacheServiceDeleteResponse, None]:
    """Deletes what the request of a creation or of forks has made; if that request arrives later, it makes nothing."""
    request = pb.CacheServiceDeleteRequest(request_ids=[made.request.request_id])  # type: ignore[attr-defined]
    return Rpc(_SERVICE + "Delete", request, pb.CacheServiceDeleteResponse, lambda response: None)


def _duration(ttl: float | None) -> Duration | None:
    if ttl is None:
        return None
    seconds = arguments.number("ttl", ttl)
    if not 0 < seconds <= _LONGEST_TTL:
        expected = f"seconds, more than 0 and at most {_LONGEST_TTL:g}, or None"
        raise InvalidRequestError(f"ttl: expected {expected}, found {ttl!r}", field="ttl")
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9) or 1)
    return duration


def _page(response: pb.CacheServiceListResponse) -> Page:
    _check_part("free_bytes", response.free_bytes, response.pool_bytes)
    pool = CachePool(tuple(map(_cache, response.caches)), response.pool_bytes, response.free_bytes)
    return Page(pool, response.next_page_token)


def _length(expected: int, response: pb.CacheServiceAppendResponse) -> int:
    if response.length != expected:
        raise ProtocolError(f"length: expected {expected}, the server replied with {response.length}")
    return expected


def _deleted(most: int, response: pb.CacheServiceDeleteResponse) -> int:
    _check_part("deleted", response.deleted, most)
    return response.deleted


def _shape(cache: CacheInfo) -> dict[str, Any]:
    """What never changes about a cache, and is the same for its forks, by the names of the fields."""
    return {name: getattr(cache, name) for name in ("num_kv_heads", "head_dim", "value_dim", "layers", "dtype")}


def _only_cache(
    expected: dict[str, Any], longest: int | None, response: pb.CacheServiceCreateResponse | pb.CacheServiceGetResponse
) -> CacheInfo:
    """The cache of a response. ProtocolError if there is none, or another than expected."""
    return _expected_cache(expected, longest, response.cache)


def _expected_cache(expected: dict[str, Any], longest: int | None, cache: pb.Cache) -> CacheInfo:
    """A cache as it is described. ProtocolError if it is another than expected: with other values in fields of these
    names, or with another length of its longest layer, if that is given.
    """
    info = _cache(cache)
    for field, value in expected.items():
        if (found := getattr(info, field)) != value:
            shown = shown_name if field == "name" else repr
            raise ProtocolError(f"{field}: expected {shown(value)}, the server replied with {shown(found)}")
    if longest is not None and max(info.lengths) != longest:
        lengths = list(info.lengths)
        raise ProtocolError(f"lengths: expected the longest to be {longest}, the server replied with {lengths}")
    return info


def _forks(caches: Sequence[CacheInfo], response: pb.CacheServiceForkResponse) -> list[CacheInfo]:
    """The forks of these caches, in their order. ProtocolError if they are not as many caches of their own."""
    _check_number(response.caches, caches)
    names = {cache.name for cache in caches}
    forks = []
    for cache, described in zip(caches, response.caches, strict=True):
        forks.append(fork := _expected_cache(_shape(cache), None, described))
        if fork.name in names:
            known = "that of a forked one or of an earlier fork"
            raise ProtocolError(f"name: expected that of another cache, the server replied with {known}")
        names.add(fork.name)
    return forks


def _truncated(truncations: Sequence[Truncation], response: pb.CacheServiceTruncateResponse) -> list[CacheInfo]:
    """The caches after their truncation. ProtocolError if they are others, or of other lengths."""
    _check_number(response.caches, truncations)
    return [
        _expected_cache({"name": cache.name, **_shape(cache)}, length, described)
        for (cache, length, *_), described in zip(truncations, response.caches, strict=True)
    ]


def _check_number(found: Sized, expected: Sized) -> None:
    """ProtocolError if a response has another number of caches than is expected."""
    if len(found) != len(expected):
        raise ProtocolError(f"caches: expected {len(expected)}, the server replied with {len(found)}")


def _cache(cache: pb.Cache) -> CacheInfo:
    if not cache.name or not cache.lengths or len(cache.lengths) != cache.layers:
        raise ProtocolError("the server replied with no cache, or one without a name, or with lengths of no layers")
    _check_part("shared_bytes", cache.shared_bytes, cache.bytes)
    return CacheInfo(
        name=cache.name,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        value_dim=cache.value_dim,
        layers=cache.layers,
        dtype=_dtypes.name(cache.dtype),
        lengths=tuple(cache.lengths),
        bytes=cache.bytes,
        shared_bytes=cache.shared_bytes,
        ttl=_seconds("ttl", cache),
        remaining=_seconds("remaining", cache),
        address=cache.address or None,
        alias=cache.alias or None,
    )


def _check_part(field: str, part: int, whole: int) -> None:
    """ProtocolError if so many bytes, or caches, are said to be a part of fewer."""
    if part > whole:
        raise ProtocolError(f"{field}: expected at most {whole}, the server replied with {part}")


def _seconds(field: str, cache: pb.Cache) -> float | None:
    """The duration in that field of a cache; None if it has none. ProtocolError if it is negative."""
    if not cache.HasField(field):
        return None
    duration = getattr(cache, field)
    seconds: float = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        raise ProtocolError(f"{field}: expected no less than 0 seconds, the server replied with {seconds:g}")
    return seconds
