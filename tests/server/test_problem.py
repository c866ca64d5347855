"""What breaks the contract, field by field: every field of a request is broken here, and named by its error.

Contents (lengths that lie, offsets beyond all bounds) are broken in `test_request`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import messages
import ml_dtypes
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.errors import InvalidRequest, Malformed

B, HQ, HK, LQ, S, D, DK, DV, U = 2, 4, 2, 3, 5, 8, 7, 6, 9
FLOAT, MASK, INT = np.dtype(np.float32), np.dtype(bool), np.dtype(np.int64)
CANNOT_BE_BROKEN = {"causal", "return_lse"}
"""Bools: whatever is given is legal."""
OF_CACHES = {"caches.name", "caches.layer", "caches.expected_length"}
"""Fields that make it a request to caches, whose tests are tests/caches."""


def zeros(*shape: int, dtype: Any = FLOAT) -> messages.Array:
    return np.zeros(shape, dtype)


def tensor(*shape: int, dtype: Any = FLOAT) -> tensor_pb2.Tensor:
    return messages.tensor(zeros(*shape, dtype=dtype))


def dot() -> pb.AttendRequest:
    """A request with every tensor that one with inline keys of rank 4 can have."""
    return messages.attend(
        zeros(B, HQ, LQ, D),
        zeros(B, HK, S, D),
        zeros(B, HK, S, DV),
        mask=zeros(B, 1, LQ, S, dtype=MASK),
        bias=zeros(HQ, 1, S),
        alibi_slopes=zeros(HQ),
        sinks=zeros(HQ),
        kv_lengths=zeros(B, dtype=INT),
        query_offset=zeros(B, dtype=INT),
        window=pb.Window(left=1, right=1),
        causal=True,
    )


def learned(**score: Any) -> pb.AttendRequest:
    return messages.attend(zeros(B, HQ, LQ, D), zeros(B, HK, S, DK), zeros(B, HK, S, DV), **score)


def general() -> pb.AttendRequest:
    return learned(general=pb.GeneralScore(weight=tensor(D, DK)))


def additive() -> pb.AttendRequest:
    parameters = {"query_weight": (U, D), "key_weight": (U, DK), "bias": (U,), "output_weight": (U,)}
    return learned(additive=pb.AdditiveScore(**{name: tensor(*shape) for name, shape in parameters.items()}))


def packed() -> pb.AttendRequest:
    """Two sequences, of 3 and 4 queries and of 5 and 0 keys."""
    return messages.attend(
        zeros(7, HQ, D),
        zeros(5, HK, D),
        zeros(5, HK, DV),
        layout=pb.LAYOUT_PACKED,
        query_lengths=np.array([3, 4]),
        kv_lengths=np.array([5, 0]),
        mask=zeros(4, 5, dtype=MASK),
        bias=zeros(4, 5),
    )


BASES: dict[str, Callable[[], pb.AttendRequest]] = {
    "dot": dot,
    "general": general,
    "additive": additive,
    "packed": packed,
}

TENSORS: dict[str, tuple[str, np.dtype[Any]]] = {
    "query": ("dot", FLOAT),
    "key": ("dot", FLOAT),
    "value": ("dot", FLOAT),
    "mask": ("dot", MASK),
    "bias": ("dot", FLOAT),
    "alibi_slopes": ("dot", FLOAT),
    "sinks": ("dot", FLOAT),
    "kv_lengths": ("dot", INT),
    "query_offset": ("dot", INT),
    "query_lengths": ("packed", INT),
    "general.weight": ("general", FLOAT),
    "additive.query_weight": ("additive", FLOAT),
    "additive.key_weight": ("additive", FLOAT),
    "additive.bias": ("additive", FLOAT),
    "additive.output_weight": ("additive", FLOAT),
}
"""Every tensor of a request, a base that has it, and a dtype that it may have."""

Case = tuple[str, str, Any, str]
"""A base, the path of a field, what to put there (None: nothing), and the field that the error names."""


def at(message: Any, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
    return message


def tensor_cases() -> Iterator[Case]:
    """What is wrong with any tensor, whatever it is for."""
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
        overflow = "shape" if path == "query_lengths" else "data"  # whose rank is looked at first
        yield base, f"{path}.shape", [2**31 - 1] * 4, f"{path}.{overflow}"  # 2 ** 124 elements
        yield base, f"{path}.shape", [2**16] * 4, f"{path}.{overflow}"  # 2 ** 64 elements: 0, to 64 bits
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
    # required tensors
    *((TENSORS[path][0], path, None, path) for path in ("query", "key", "value", "general.weight")),
    *(("additive", f"additive.{name}", None, f"additive.{name}") for name in ("query_weight", "key_weight")),
    *(("packed", name, None, name) for name in ("query_lengths", "kv_lengths")),
    # ranks
    *(("dot", "query", tensor(*shape), "query.shape") for shape in ((), (8,), (1, 2, 4, 3, 8))),
    *(("dot", name, tensor(2, 5, 8), f"{name}.shape") for name in ("key", "value")),
    ("packed", "query", tensor(1, 7, HQ, D), "query.shape"),
    ("packed", "query", tensor(7, D), "query.shape"),
    ("dot", "layout", pb.LAYOUT_PACKED, "query.shape"),
    # dtypes that differ
    *(
        ("dot", name, tensor(B, HK, S, width, dtype=dtype), f"{name}.dtype")
        for name, width in (("key", D), ("value", DV))
        for dtype in (np.float16, np.float64, ml_dtypes.bfloat16)
    ),
    # axes that differ
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
    ("dot", "layout", pb.LAYOUT_LENGTH_FIRST, "query.shape"),  # 3 heads of queries, 5 of keys
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


def broken(base: str, path: str, value: Any) -> pb.AttendRequest:
    """The base with a value at a path."""
    message = BASES[base]()
    *parents, name = path.split(".")
    owner = at(message, ".".join(parents)) if parents else message
    if value is None:
        owner.ClearField(name)
    elif isinstance(value, tensor_pb2.Tensor):
        getattr(owner, name).CopyFrom(value)
    elif isinstance(value, list):
        getattr(owner, name)[:] = value
    else:
        setattr(owner, name, value)
    return message


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
    reason = "LIMIT_EXCEEDED" if "axes" in str(error) else "INVALID_FIELD"
    assert (info.reason, info.metadata["field"]) == (reason, field)
    assert [violation.field for violation in bad_request.field_violations] == [field]


def leaves(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that are no messages."""
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


@pytest.mark.parametrize("field", ["scale", "softcap"])
def test_zero_and_absent(field: str) -> None:
    message = messages.random_attend(0, 3, width=16)
    assert messages.read(message).problem.scale == 0.25
    setattr(message, field, 0.0)
    assert getattr(messages.read(message).problem, field) == 0.0


def test_defaults() -> None:
    problem = messages.read(messages.random_attend(0, 3, kv_length=4, batch=2, heads=4, kv_heads=2, width=8)).problem
    assert (problem.batch, problem.query_heads, problem.kv_heads) == (2, 4, 2)
    assert (problem.query_length, problem.kv_length) == (3, 4)
    assert (problem.head_dim, problem.key_dim, problem.value_dim) == (8, 8, 8)
    assert problem.scale == pytest.approx(8**-0.5, rel=1e-15)
    assert (problem.softcap, problem.causal, problem.window) == (0.0, False, (-1, -1))
    assert (problem.bottom_right, problem.needs_positions, problem.score) == (False, False, None)
    assert (problem.return_lse, problem.return_scores, problem.priority) == (False, None, 0)
    assert (problem.rank, problem.packed, problem.length_first) == (4, False, False)


def test_the_scale_of_learned_scores_is_1() -> None:
    assert messages.read(general()).problem.scale == 1.0
    assert messages.read(additive()).problem.scale == 1.0


@pytest.mark.parametrize(
    ("layout", "query", "key", "axes"),
    [
        (pb.LAYOUT_UNSPECIFIED, (2, 4, 3, 8), (2, 2, 5, 8), (2, 4, 2, 3, 5)),
        (pb.LAYOUT_HEADS_FIRST, (2, 4, 3, 8), (2, 2, 5, 8), (2, 4, 2, 3, 5)),
        (pb.LAYOUT_LENGTH_FIRST, (2, 3, 4, 8), (2, 5, 2, 8), (2, 4, 2, 3, 5)),
        (pb.LAYOUT_HEADS_FIRST, (4, 3, 8), (2, 5, 8), (1, 4, 2, 3, 5)),
        (pb.LAYOUT_LENGTH_FIRST, (3, 4, 8), (5, 2, 8), (1, 4, 2, 3, 5)),
        (pb.LAYOUT_HEADS_FIRST, (3, 8), (5, 8), (1, 1, 1, 3, 5)),
        (pb.LAYOUT_LENGTH_FIRST, (3, 8), (5, 8), (1, 1, 1, 3, 5)),
    ],
)
def test_layouts_and_ranks(
    layout: int, query: tuple[int, ...], key: tuple[int, ...], axes: tuple[int, int, int, int, int]
) -> None:
    problem = messages.read(messages.attend(zeros(*query), zeros(*key), zeros(*key), layout=layout)).problem
    assert (
        problem.batch,
        problem.query_heads,
        problem.kv_heads,
        problem.query_length,
        problem.kv_length,
    ) == axes
    assert problem.rank == len(query)


@pytest.mark.parametrize(
    "shape", [(), (1,), (S,), (LQ, 1), (LQ, S), (1, 1), (HQ, 1, S), (1, LQ, S), (B, 1, 1, 1), (B, HQ, LQ, S)]
)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_what_broadcasts_is_taken(name: str, shape: tuple[int, ...]) -> None:
    spec = messages.read(broken("dot", name, tensor(*shape, dtype=TENSORS[name][1]))).problem.tensors[name]
    assert spec.shape == shape


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("path", ["bias", "alibi_slopes", "sinks", "general.weight", "additive.key_weight"])
def test_parameters_may_have_any_floating_dtype(path: str, dtype: Any) -> None:
    base, _ = TENSORS[path]
    shape = tuple(at(BASES[base](), path).shape)
    messages.read(broken(base, path, tensor(*shape, dtype=dtype)))


def test_windows_wider_than_any_distance_are_open() -> None:
    message = messages.random_attend(0, 3, window=pb.Window(left=2**63 - 1, right=2**41))
    assert messages.read(message).problem.window == (-1, 2**41)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"causal": True}, {}),
        ({"scale": 1.0}, {"scale": 2.0}),
        ({"softcap": 1.0}, {}),
        ({"return_lse": True}, {}),
        ({"return_scores": pb.SCORE_STAGE_RAW}, {"return_scores": pb.SCORE_STAGE_WEIGHTS}),
        ({"window": pb.Window(left=1, right=0)}, {"window": pb.Window(left=1, right=1)}),
        ({"sinks": zeros(2)}, {}),
        ({"alibi_slopes": zeros(2)}, {}),
        ({"mask": zeros(3, 3, dtype=MASK)}, {}),
        ({"bias": zeros(3, 3)}, {}),
        ({"dtype": np.float16}, {}),
        ({"heads": 4}, {}),
        ({"heads": 4, "kv_heads": 2}, {"heads": 4}),
        ({"width": 16}, {}),
    ],
    ids=lambda fields: "-".join(fields) or "none",
)
def test_what_cannot_run_together_has_different_groups(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert messages.read(messages.random_attend(0, **one)).problem.group != (
        messages.read(messages.random_attend(0, **other)).problem.group
    )


def test_lengths_contents_and_priorities_do_not_keep_requests_apart() -> None:
    groups = {
        messages.read(
            messages.random_attend(seed, length, kv_length=keys, batch=batch, priority=priority)
        ).problem.group
        for seed, (length, keys, batch, priority) in enumerate([(1, 1, 1, 0), (3, 9, 2, 8), (0, 0, 0, -8)])
    }
    assert len(groups) == 1


def test_only_an_additive_score_needs_memory_for_its_hidden_units() -> None:
    """Keys projected to them, twice, in float64."""
    assert messages.read(additive()).problem.scratch_bytes(S) == 2 * 8 * U * HK * S
    for other in (dot(), general()):
        assert messages.read(other).problem.scratch_bytes(S) == 0


def test_what_is_computed_by_other_means_is_another_kind_of_work() -> None:
    softcapped = messages.random_attend(0, softcap=1.0)
    kinds = [messages.read(each).problem.kind for each in (dot(), general(), additive(), softcapped)]
    assert len(set(kinds)) == 4
    assert messages.read(messages.random_attend(0, causal=True)).problem.kind == kinds[0]
