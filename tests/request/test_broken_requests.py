"""Broken requests, field by field: every field of a request is broken here, and named by the error.

Contents (lengths that lie, offsets beyond all bounds) are broken in `test_request`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import messages
import ml_dtypes
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2
from whole_requests import (
    BASES,
    DK,
    DV,
    FLOAT,
    HK,
    HQ,
    INT,
    LQ,
    MASK,
    TENSORS,
    B,
    D,
    S,
    U,
    at,
    broken,
    tensor,
    zeros,
)

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.errors import InvalidRequest, Malformed

CANNOT_BE_BROKEN = {"causal", "return_lse"}
"""Bools: any value is legal."""
OF_CACHES = {"caches.name", "caches.layer", "caches.expected_length", "caches.append_id"}
"""Fields of requests to caches, whose tests are in tests/caches."""


Case = tuple[str, str, Any, str]
"""A base, the path of a field, its new value (None: cleared), and the field that the error names."""


def tensor_cases() -> Iterator[Case]:
    """Ways to break any tensor, whatever it is for."""
    for path, (base, dtype) in TENSORS.items():
        wrong = FLOAT if dtype == MASK else MASK
        shape = list(at(BASES[base](), path).shape)
        size = math.prod(shape) * dtype.itemsize
        for value in (tensor_pb2.DATA_TYPE_UNSPECIFIED, 99, -1):
            yield base, f"{path}.dtype", value, f"{path}.dtype"
        yield base, path, tensor(*shape, dtype=wrong), f"{path}.dtype"
        yield base, f"{path}.shape", [-1, *shape[1:]], f"{path}.shape"
        yield base, f"{path}.shape", [-(2**63), *shape[1:]], f"{path}.shape"
        yield base, f"{path}.shape", [2**63 - 1] * 4, f"{path}.shape"
        overflow = "shape" if path == "query_lengths" else "data"  # for lengths the rank is checked first
        yield base, f"{path}.shape", [2**31 - 1] * 4, f"{path}.{overflow}"  # 2 ** 124 elements
        yield base, f"{path}.shape", [2**16] * 4, f"{path}.{overflow}"  # 2 ** 64 elements: 0 in 64 bits
        yield base, f"{path}.data", b"", f"{path}.data"
        for length in (size - 1, size + 1, 2 * size):
            yield base, f"{path}.data", bytes(length), f"{path}.data"


CASES: list[Case] = [
    *tensor_cases(),
    ("dot", "layout", 99, "layout"),
    ("dot", "layout", -1, "layout"),
    ("dot", "alignment", 99, "alignment"),
    ("dot", "return_scores", 99, "return_scores"),
    ("dot", "priority", 9, "priority"),
    ("dot", "priority", -9, "priority"),
    ("dot", "window.left", -2, "window.left"),
    ("dot", "window.right", -2, "window.right"),
    *(("dot", "scale", value, "scale") for value in (math.nan, math.inf, -math.inf)),
    *(("dot", "softcap", value, "softcap") for value in (math.nan, math.inf, -math.inf, -1.0)),
    # missing required tensors
    *((TENSORS[path][0], path, None, path) for path in ("query", "key", "value", "general.weight")),
    *(("additive", f"additive.{name}", None, f"additive.{name}") for name in ("query_weight", "key_weight")),
    *(("packed", name, None, name) for name in ("query_lengths", "kv_lengths")),
    # ranks
    *(("dot", "query", tensor(*shape), "query.shape") for shape in ((), (8,), (1, 2, 4, 3, 8))),
    *(("dot", name, tensor(2, 5, 8), f"{name}.shape") for name in ("key", "value")),
    ("packed", "query", tensor(1, 7, HQ, D), "query.shape"),
    ("packed", "query", tensor(7, D), "query.shape"),
    ("dot", "layout", pb.LAYOUT_PACKED, "query.shape"),
    # differing dtypes
    *(
        ("dot", name, tensor(B, HK, S, width, dtype=dtype), f"{name}.dtype")
        for name, width in (("key", D), ("value", DV))
        for dtype in (np.float16, np.float64, ml_dtypes.bfloat16)
    ),
    # differing axes
    ("dot", "key", tensor(B + 1, HK, S, D), "key.shape"),
    ("dot", "value", tensor(B + 1, HK, S, DV), "value.shape"),
    ("dot", "value", tensor(B, HK + 1, S, DV), "value.shape"),
    ("dot", "value", tensor(B, HK, S + 1, DV), "value.shape"),
    ("dot", "key", tensor(B, HK, S, D + 1), "key.shape"),
    ("dot", "query", tensor(B, 3, LQ, D), "query.shape"),  # not a multiple of HK
    ("dot", "query", tensor(B, 0, LQ, D), "query.shape"),
    ("dot", "query", tensor(B, HQ, LQ, 0), "query.shape"),
    ("dot", "key", tensor(B, 0, S, D), "value.shape"),
    ("dot", "key", tensor(B, HK, S, 0), "key.shape"),
    ("dot", "value", tensor(B, HK, S, 0), "value.shape"),
    ("dot", "layout", pb.LAYOUT_LENGTH_FIRST, "query.shape"),  # 3 query heads, 5 key heads
    # parameters
    *(("dot", name, tensor(HQ + 1), f"{name}.shape") for name in ("alibi_slopes", "sinks")),
    *(("dot", name, tensor(1), f"{name}.shape") for name in ("alibi_slopes", "sinks")),
    *(("dot", name, tensor(1, HQ), f"{name}.shape") for name in ("alibi_slopes", "sinks")),
    ("general", "general.weight", tensor(DK, D), "general.weight.shape"),
    ("general", "general.weight", tensor(D * DK), "general.weight.shape"),
    ("additive", "additive.query_weight", tensor(U, D + 1), "additive.query_weight.shape"),
    ("additive", "additive.query_weight", tensor(U), "additive.query_weight.shape"),
    ("additive", "additive.query_weight", tensor(0, D), "additive.query_weight.shape"),
    ("additive", "additive.key_weight", tensor(U, D), "additive.key_weight.shape"),
    ("additive", "additive.key_weight", tensor(U + 1, DK), "additive.key_weight.shape"),
    *(
        ("additive", f"additive.{name}", tensor(*shape), f"additive.{name}.shape")
        for name in ("bias", "output_weight")
        for shape in ((U + 1,), (1,), (U, 1), ())
    ),
    # masks and biases that do not broadcast
    *(
        (base, name, tensor(*shape, dtype=TENSORS[name][1]), f"{name}.shape")
        for base, name in (("dot", "mask"), ("dot", "bias"))
        for shape in ((S + 1,), (LQ + 1, S), (HK, LQ, S), (3, 1, 1, 1), (1, 1, 1, LQ, S), (B, HQ, LQ), (0,))
    ),
    # lengths and offsets
    *(("dot", "kv_lengths", tensor(*shape, dtype=INT), "kv_lengths.shape") for shape in ((), (1,), (3,), (2, 1))),
    *(("dot", "query_offset", tensor(*shape, dtype=INT), "query_offset.shape") for shape in ((3,), (2, 1), (0,))),
    *(("packed", "query_lengths", tensor(*shape, dtype=INT), "query_lengths.shape") for shape in ((), (2, 1))),
    ("packed", "kv_lengths", tensor(3, dtype=INT), "kv_lengths.shape"),
    ("dot", "query_lengths", tensor(B, dtype=INT), "query_lengths"),
]


@pytest.mark.parametrize("base", BASES)
def test_the_bases_are_sound(base: str) -> None:
    messages.read(BASES[base]())


@pytest.mark.parametrize(
    ("base", "path", "value", "field"),
    CASES,
    ids=[f"{base}-{path}-{number}" for number, (base, path, _, _) in enumerate(CASES)],
)
def test_a_broken_field_is_named(base: str, path: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages.read(broken(base, path, value))
    error = caught.value
    assert error.field == field
    assert str(error).startswith(f"{field}: expected ")
    assert ", found " in str(error)
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    details = error.status().details
    assert details[0].Unpack(info)
    assert details[1].Unpack(bad_request)
    limits = {"at most 4 axes": "max_rank", "lengths of at most 2147483647": "max_axis_length"}
    limit = next((name for words, name in limits.items() if f"expected {words} ({name})" in str(error)), None)
    metadata = {"field": field} if limit is None else {"field": field, "limit": limit}
    assert (info.reason, dict(info.metadata)) == ("INVALID_FIELD" if limit is None else "LIMIT_EXCEEDED", metadata)
    assert [violation.field for violation in bad_request.field_violations] == [field]


@pytest.mark.parametrize("rank", [2, 4])
def test_keys_of_another_rank_are_refused_even_if_they_would_fit(rank: int) -> None:
    query, keys = zeros(*(1, 1, LQ, D)[-rank:]), zeros(1, LQ, D)
    with pytest.raises(InvalidRequest, match=rf"^key\.shape: expected rank {rank} as in query, found shape \[1, 3, "):
        messages.read(messages.attend(query, keys, keys))


def leaves(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that are not messages."""
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from leaves(field.message_type, f"{path}.")
        else:
            yield path


def test_every_field_of_a_request_has_a_case() -> None:
    named = {field for _, _, _, field in CASES}
    assert set(leaves(pb.AttendRequest.DESCRIPTOR)) - named == CANNOT_BE_BROKEN | OF_CACHES


def test_tensors_are_complete() -> None:
    fields = (path.rpartition(".") for path in leaves(pb.AttendRequest.DESCRIPTOR))
    assert {parent for parent, _, name in fields if name == "data"} == set(TENSORS)


def test_bytes_that_are_no_message() -> None:
    for garbage in (b"\xff", b"\x0a", b"\x82\x01\x7f", bytes(range(255))):
        with pytest.raises(Malformed) as caught:
            messages.read_request(garbage)
        assert caught.value.reason == "MALFORMED_MESSAGE"


def test_bytes_that_are_no_message_where_a_field_is_one() -> None:
    sound = pb.AttendRequest(window=pb.Window(left=1)).SerializeToString()
    for garbage in (b"\xff\xff", b"\x08\xff"):
        broken_window = sound[:-2] + garbage
        with pytest.raises(Malformed) as caught:
            messages.read_request(BASES["general"]().SerializeToString() + broken_window)
        assert caught.value.reason == "MALFORMED_MESSAGE"
