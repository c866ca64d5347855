"""The lengths of the axes of queries, keys and values in any layout, checked against each other.

In: their dtypes and shapes, as a header states them. Out: `Axes`, or InvalidRequest with the path of what does not fit.
"""

from __future__ import annotations

from typing import NamedTuple

from attnserve import _dtypes
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.tensors import TensorSpec, check_rank, shown


class KeyShape(NamedTuple):
    """The shape of resident keys and values, apart from their number."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Axes(NamedTuple):
    """The lengths of the axes of queries, keys and values, in any layout."""

    batch: int
    query_heads: int
    kv_heads: int
    query_length: int
    kv_length: int
    head_dim: int
    key_dim: int
    value_dim: int


def nothing_appended(query: TensorSpec, resident: KeyShape, length_first: bool) -> tuple[TensorSpec, TensorSpec]:
    """Keys and values without tokens, for a request that only reads resident ones."""
    rank = len(query.shape)
    heads_and_length = (0, resident.kv_heads) if length_first else (resident.kv_heads, 0)
    outer = (*query.shape[: rank - 3], *heads_and_length) if rank > 2 else (0,)
    key, value = (TensorSpec(-1, query.dtype, (*outer, width)) for width in (resident.key_dim, resident.value_dim))
    return key, value


def check_ranks(
    message: pb.AttendRequest, query: TensorSpec, key: TensorSpec, value: TensorSpec, resident: KeyShape | None
) -> None:
    """Raises InvalidRequest if the layout is unknown, or dtypes or ranks do not fit it or each other."""
    rank, packed = len(query.shape), message.layout == pb.LAYOUT_PACKED
    if message.layout not in pb.Layout.values():
        raise InvalidRequest("layout", "one of the layouts", message.layout)
    if packed and resident is not None:
        raise InvalidRequest("layout", "heads first or length first with caches", "packed")
    if packed and rank != 3:
        raise InvalidRequest("query.shape", "rank 3, [total, H, D], where packed", shown(query))
    if not 2 <= rank <= 4:
        raise InvalidRequest("query.shape", "rank 2, 3 or 4", shown(query))
    for field, spec in (("key", key), ("value", value)):
        if spec.dtype != query.dtype:
            raise InvalidRequest(f"{field}.dtype", f"{_dtypes.name(query.dtype)} as in query", _dtypes.name(spec.dtype))
        if len(spec.shape) != rank:
            raise InvalidRequest(f"{field}.shape", f"rank {rank} as in query", shown(spec))


def axes_of(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, length_first: bool, resident: KeyShape | None, of_keys: str
) -> Axes:
    """The axes of three tensors of one rank. Raises InvalidRequest if they do not fit each other and resident keys."""
    (batch, query_heads, query_length, head_dim) = _axes(query.shape, length_first)
    (key_batch, kv_heads, kv_length, key_dim) = _axes(key.shape, length_first)
    (value_batch, value_heads, value_length, value_dim) = _axes(value.shape, length_first)
    for field, spec, found in (("key", key, key_batch), ("value", value, value_batch)):
        if found != batch:
            raise InvalidRequest(f"{field}.shape", f"a batch of {batch} as in query", shown(spec))
    if value_heads != kv_heads:
        raise InvalidRequest("value.shape", f"{_heads(kv_heads)} as in key", shown(value))
    if value_length != kv_length:
        raise InvalidRequest("value.shape", f"length {kv_length} as in key", shown(value))
    for field, spec, heads, width in (
        ("query", query, query_heads, head_dim),
        ("key", key, kv_heads, key_dim),
        ("value", value, value_heads, value_dim),
    ):
        if heads < 1 or width < 1:
            raise InvalidRequest(f"{field}.shape", "at least one head and a width of at least 1", shown(spec))
    if resident is not None:
        if of_keys == "key":
            _check_resident("key", key, kv_heads, resident.kv_heads, key_dim, resident.key_dim)
            _check_resident("value", value, value_heads, resident.kv_heads, value_dim, resident.value_dim)
        kv_heads = resident.kv_heads  # where nothing is appended, a query of rank 2 says nothing of it
    if query_heads % kv_heads:
        raise InvalidRequest("query.shape", f"a multiple of the {kv_heads} heads of {of_keys}", _heads(query_heads))
    return Axes(batch, query_heads, kv_heads, query_length, kv_length, head_dim, key_dim, value_dim)


def _check_resident(
    field: str, spec: TensorSpec, heads: int, resident_heads: int, width: int, resident_width: int
) -> None:
    """Raises InvalidRequest if what is appended does not have the heads and the width of what is resident."""
    if heads != resident_heads:
        raise InvalidRequest(f"{field}.shape", f"{_heads(resident_heads)}, as the caches have", _heads(heads))
    if width != resident_width:
        raise InvalidRequest(
            f"{field}.shape", f"width {resident_width}, as the {field}s of the caches have", shown(spec)
        )


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def _axes(shape: tuple[int, ...], length_first: bool) -> tuple[int, int, int, int]:
    """Batch, heads, length and width; what the rank lacks is 1."""
    *outer, width = shape
    if len(outer) == 1:
        return 1, 1, outer[0], width
    batch = outer[0] if len(outer) == 3 else 1
    heads, length = (outer[-1], outer[-2]) if length_first else (outer[-2], outer[-1])
    return batch, heads, length, width


def batch_of_packed(message: pb.AttendRequest) -> int:
    """The number of sequences in a packed request. Raises InvalidRequest if it does not give their lengths."""
    for name in ("query_lengths", "kv_lengths"):
        if not message.HasField(name):
            raise InvalidRequest(name, "the lengths of the packed sequences", "nothing")
    shape = message.query_lengths.shape
    check_rank("query_lengths.shape", shape)
    if len(shape) != 1:
        raise InvalidRequest("query_lengths.shape", "[B]", list(shape))
    return shape[0]
