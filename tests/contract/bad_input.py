"""Every way for a request to be bad: the value put into a field, and the field that the error must name.

Cases that apply to all tensors, enumerations and names are derived from the descriptors; the rest is written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import grpc
import messages
import ml_dtypes
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from sound import HK, HQ, B, Caches, D, S, ids, requests, tensor

from attnserve import _dtypes
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
NOT_FOUND, EXPIRED = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED
ATTEND, APPLY, STREAM = (f"AttentionService/{name}" for name in ("Attend", "Apply", "AttendStream"))
CREATE, APPEND, FORK, TRUNCATE = (f"CacheService/{name}" for name in ("Create", "Append", "Fork", "Truncate"))

UNSET: Final = "unset"
"""Stands for a field that is not set."""
PLACEHOLDERS: Final = Caches("plain-cache", "decoder-cache")


ENDLESS: Final = [2**31 - 1] * 10_000
"""Axes whose product has more digits than Python will print. Multiplying as many as fit into a message takes hours."""


class Case(NamedTuple):
    """A sound request with one value replaced at a path, and the error it gets. `field` None: same as the path."""

    method: str
    kind: str
    path: str
    value: Any
    field: str | None = None
    code: grpc.StatusCode = INVALID
    reason: str = "INVALID_FIELD"

    def __str__(self) -> str:
        return f"{self.method.rpartition('/')[2]}-{self.kind}-{self.path}"


ANYTHING_GOES: Final[dict[str, set[str]]] = {
    ATTEND: {"causal", "return_lse"},  # both values of a bool are legal, everywhere
    APPLY: set(),
    # The requests inside a stream are read by the readers of Attend and Apply, whose cases are all sent on a stream
    # too. Unknown ids are ignored, and so, by the standard, is a malformed trace context.
    STREAM: {"cancel", "calls.apply", "calls.traceparent", "calls.tracestate"},
    APPEND: {"append_id", "length_first"},  # an unused id just identifies another append
    TRUNCATE: {"truncations.truncation_id"},
    "CacheService/List": {"page_size"},  # 0 and what is too large stand for the most
    # Deleting names that do not exist is no error.
}
"""Fields for which no value is an error by itself."""


def leaves(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that are not messages, without those of the requests inside a stream's calls."""
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_MESSAGE and not path.startswith(("calls.attend", "calls.apply")):
            yield from leaves(field.message_type, f"{path}.")
        else:
            yield path


def given(message: Message, prefix: str = "") -> Iterator[tuple[str, Any, FieldDescriptor]]:
    """Every field set anywhere in a message: path, value and descriptor. Of a repeated message, the first element."""
    for field, value in message.ListFields():
        path, one = f"{prefix}{field.name}", value
        if field.is_repeated and field.type == FieldDescriptor.TYPE_MESSAGE:
            path, one = f"{path}[0]", value[0]
        yield path, one, field
        if field.type == FieldDescriptor.TYPE_MESSAGE and not isinstance(one, tensor_pb2.Tensor):
            yield from given(one, f"{path}.")


def of_tensor(path: str, sound: tensor_pb2.Tensor) -> Iterator[tuple[str, Any, str]]:
    """Errors that apply to any tensor, whatever its use."""
    shape, name = list(sound.shape), path.rpartition(".")[2]
    for dtype in (tensor_pb2.DATA_TYPE_UNSPECIFIED, 99, -1):
        yield f"{path}.dtype", dtype, f"{path}.dtype"
    floating = sound.dtype in _dtypes.FLOATING
    other = np.dtype(bool) if floating else np.dtype(np.float32)
    if not (name == "input" and not floating):  # activations differ from ids in rank too
        yield path, messages.tensor(np.zeros(shape, other)), f"{path}.dtype"
    yield f"{path}.shape", [-1, *shape[1:]], f"{path}.shape"
    yield f"{path}.shape", [-(2**63), *shape[1:]], f"{path}.shape"
    yield f"{path}.shape", [2**31 - 1] * len(shape), f"{path}.data"  # up to 2 ** 124 elements
    if name not in ("mask", "bias", "query_offset") or path.startswith("additive"):  # these may be scalars
        yield path, messages.tensor(np.zeros((), _dtypes.NUMPY[sound.dtype])), f"{path}.shape"
    if size := len(sound.data):
        for length in (0, size - 1, size + 1, 2 * size):
            yield f"{path}.data", bytes(length), f"{path}.data"


def of_all_fields() -> Iterator[Case]:
    """Errors that apply to any tensor and any enumeration, for each sound request that has one."""
    for method, kinds in requests(PLACEHOLDERS).items():
        if method == STREAM:
            continue
        for kind, message in kinds.items():
            for path, value, field in given(message):
                if isinstance(value, tensor_pb2.Tensor):
                    for place, wrong, named in of_tensor(path, value):
                        yield Case(method, kind, place, wrong, named)
                    axes = [*[1] * (5 - len(value.shape)), *value.shape]
                    long = [2**63 - 1] * len(value.shape)
                    for beyond in (axes, ENDLESS, *[long] * bool(long)):
                        yield Case(method, kind, f"{path}.shape", beyond, reason="LIMIT_EXCEEDED")
                elif field.type == FieldDescriptor.TYPE_ENUM:
                    for number in (99, -1, 2**31 - 1):
                        yield Case(method, kind, path, number)


def of_attend() -> Iterator[Case]:
    for field, values in {
        "priority": (9, -9, 2**31 - 1, -(2**31)),
        "window.left": (-2, -(2**63)),
        "window.right": (-2, -(2**63)),
        "scale": (math.nan, math.inf, -math.inf),
        "softcap": (math.nan, math.inf, -math.inf, -1.0),
    }.items():
        yield from (Case(ATTEND, "dot", field, value) for value in values)
    for kind, fields in {
        "dot": ("query", "key", "value"),
        "general": ("general.weight",),
        "additive": ("additive.query_weight", "additive.key_weight"),
        "packed": ("query_lengths", "kv_lengths"),
        "resident": ("query",),
        "appending": ("key", "value"),
    }.items():
        yield from (Case(ATTEND, kind, field, UNSET) for field in fields)
    for kind, field, wrong in (
        ("dot", "query", tensor(B, HQ + 1, 3, D)),  # not a multiple of the key heads
        ("dot", "query", tensor(B, HQ, 3, 0)),
        ("dot", "key", tensor(B + 1, HK, S, D)),
        ("dot", "key", tensor(B, HK, S, D + 1)),
        ("dot", "value", tensor(B, HK, S + 1, D)),
        ("dot", "value", tensor(B, HK + 1, S, D)),
        ("dot", "mask", tensor(B, HK, 3, S, dtype=bool)),
        ("dot", "bias", tensor(S - 1)),
        ("dot", "alibi_slopes", tensor(HQ + 1)),
        ("dot", "sinks", tensor(1)),
        ("dot", "kv_lengths", ids(1)),
        ("dot", "query_offset", ids(1, 2, 3)),
        ("general", "general.weight", tensor(D, D)),
        ("additive", "additive.query_weight", tensor(0, D)),
        ("additive", "additive.key_weight", tensor(8, 7)),
        ("packed", "query", tensor(1, 7, HQ, D)),
        ("packed", "kv_lengths", ids(5)),
        ("resident", "query", tensor(1, HQ, 3, D + 1)),
        ("resident", "mask", tensor(3, S + 1, dtype=bool)),
        ("appending", "key", tensor(1, HK, 0, D - 1)),
    ):
        yield Case(ATTEND, kind, field, wrong, f"{field}.shape")
    yield Case(ATTEND, "dot", "value", tensor(B, HK, S, D, dtype=np.float16), "value.dtype")
    yield Case(ATTEND, "dot", "key", tensor(B, HK, S, D, dtype=ml_dtypes.bfloat16), "key.dtype")
    for kind, field, wrong, index in (
        ("dot", "kv_lengths", ids(S, S + 1), 1),
        ("dot", "kv_lengths", ids(-1, S), 0),
        ("dot", "query_offset", ids(0, 2**41), 1),
        ("dot", "query_offset", ids(-(2**63), 0), 0),
        ("packed", "query_lengths", ids(-1, 8), 0),
        ("packed", "kv_lengths", ids(2**63 - 1, -(2**63)), 0),
        ("resident", "kv_lengths", ids(S + 1), 0),
        ("resident", "query_offset", ids(2**41), 0),
    ):
        yield Case(ATTEND, kind, field, wrong, f"{field}[{index}]")
    yield Case(ATTEND, "packed", "query_lengths", ids(3, 3))  # wrong sum
    yield Case(ATTEND, "packed", "kv_lengths", ids(5, 1))
    yield Case(ATTEND, "dot", "query_lengths", ids(3, 3))  # not for this layout
    yield Case(ATTEND, "dot", "layout", pb.LAYOUT_PACKED, "query.shape")
    yield Case(ATTEND, "resident", "layout", pb.LAYOUT_PACKED)
    yield Case(ATTEND, "dot", "kv_lengths", ids(*[1] * 20_000), "kv_lengths.shape")
    yield from of_references(ATTEND, layers=1)


def of_references(method: str, layers: int) -> Iterator[Case]:
    """Errors in a reference to a cache."""
    yield Case(method, "resident", "caches[0].name", "")
    yield Case(method, "resident", "caches[0].name", "nothing", "", NOT_FOUND, "NOT_FOUND")
    yield Case(method, "resident", "caches[0].layer", layers)
    yield Case(method, "resident", "caches[0].layer", 2**32 - 1)
    for length in (1, 2**64 - 1):
        yield Case(method, "resident", "caches[0].expected_length", length, "", PRECONDITION, "UNEXPECTED_LENGTH")
    for count, field in ((2, "caches"), (20_000, "caches")):
        twice = [pb.CacheReference(name=PLACEHOLDERS.plain if method == ATTEND else PLACEHOLDERS.decoder)] * count
        yield Case(
            method, "resident", "caches", twice, field, INVALID, "LIMIT_EXCEEDED" if count > 2 else "INVALID_FIELD"
        )


def of_apply() -> Iterator[Case]:
    yield Case(APPLY, "self", "layer", "")
    yield Case(APPLY, "self", "layer", "nobody", "", NOT_FOUND, "NOT_FOUND")
    for field, values in {
        "priority": (9, -9),
        "window.left": (-2, -(2**63)),
        "window.right": (-2, -(2**63)),
    }.items():
        yield from (Case(APPLY, "self", field, value) for value in values)
    for field in ("causal", "return_lse", "average_scores"):  # a transformer block defines these itself
        yield Case(APPLY, "gpt2", field, True)
    yield Case(APPLY, "bert", "return_scores", pb.SCORE_STAGE_RAW)
    yield Case(APPLY, "self", "return_scores", UNSET, "average_scores")
    for kind in ("self", "bert", "resident"):
        yield Case(APPLY, kind, "input", UNSET)
    yield Case(APPLY, "decoder", "context", UNSET)
    yield Case(APPLY, "cross", "context", UNSET, "context_lengths")
    yield Case(APPLY, "packed", "context", tensor(7, 24), "context_lengths")
    for kind, field, wrong in (
        ("self", "input", tensor(B, 3, 23)),
        ("self", "lengths", ids(1, 2, 3)),
        ("self", "mask", tensor(3, 4, dtype=bool)),
        ("self", "bias", tensor(3, 1, 3, 3)),
        ("cross", "context", tensor(B, S, 11)),
        ("cross", "context_lengths", ids(1)),
        ("bert", "segments", tensor(B, 4, dtype=np.int64)),
    ):
        yield Case(APPLY, kind, field, wrong, f"{field}.shape")
    for kind, field, wrong in (
        ("gpt2", "input", tensor(20_000, 1, dtype=np.int64)),
        ("packed", "lengths", ids(*[0] * 20_000)),
    ):
        yield Case(APPLY, kind, field, wrong, f"{field}.shape", INVALID, "LIMIT_EXCEEDED")
    for kind, field, wrong, index in (
        ("self", "lengths", ids(3, 4), 1),
        ("self", "lengths", ids(-1, 3), 0),
        ("packed", "lengths", ids(2**62, 2**62), 0),
        ("cross", "context_lengths", ids(S, S + 1), 1),
        ("self", "query_offset", ids(0, 2**41), 1),
    ):
        yield Case(APPLY, kind, field, wrong, f"{field}[{index}]")
    yield Case(APPLY, "packed", "lengths", ids(4, 4))
    yield Case(APPLY, "cross", "context", tensor(B, S, 10, dtype=np.float16), "context.dtype")
    yield Case(APPLY, "gpt2", "input", ids(-1))
    yield Case(APPLY, "gpt2", "input", ids(2**63 - 1))
    yield Case(APPLY, "gpt2", "query_offset", ids(-1))
    yield Case(APPLY, "bert", "segments", ids(*[0, 9] * 3), "segments.shape")
    yield Case(APPLY, "resident", "query_offset", ids(0))
    yield Case(APPLY, "resident", "alignment", pb.ALIGNMENT_TOP_LEFT)
    yield from of_references(APPLY, layers=1)


def of_streams() -> Iterator[Case]:
    yield Case(STREAM, "attend", "calls[0].id", 2, "id", INVALID, "DUPLICATE_ID")
    yield Case(STREAM, "attend", "calls[0].attend", UNSET, "operation")
    for timeout in ({}, {"nanos": -1}, {"seconds": -(2**63), "nanos": 2**31 - 1}):
        yield Case(STREAM, "attend", "calls[0].timeout", timeout, "", EXPIRED, "DEADLINE_EXCEEDED")


def of_caches() -> Iterator[Case]:
    for field in ("num_kv_heads", "head_dim", "dtype"):
        yield Case(CREATE, "", field, UNSET)
    yield Case(CREATE, "", "dtype", tensor_pb2.DATA_TYPE_FLOAT64)
    yield Case(CREATE, "", "dtype", tensor_pb2.DATA_TYPE_BOOL)
    yield Case(CREATE, "", "num_kv_heads", 2**32 - 1, "head_dim", INVALID, "LIMIT_EXCEEDED")
    yield Case(CREATE, "", "head_dim", 2**32 - 1, "head_dim", INVALID, "LIMIT_EXCEEDED")
    yield Case(CREATE, "", "value_dim", 2**32 - 1, "value_dim", INVALID, "LIMIT_EXCEEDED")
    yield Case(CREATE, "", "layers", 2**32 - 1, "layers", INVALID, "LIMIT_EXCEEDED")
    yield Case(CREATE, "", "alias", "it", "request_id")
    yield Case(CREATE, "aliased", "alias", "é" * 129)
    for method in (CREATE, FORK):
        yield Case(method, "", "request_id", bytes(65), "request_id")
        yield Case(method, "", "ttl", {}, "ttl")
        yield Case(method, "", "ttl", {"seconds": -1}, "ttl")
        yield Case(method, "", "ttl.seconds", 2**63 - 1)
        yield Case(method, "", "ttl.seconds", -(2**63))
        yield Case(method, "", "ttl.nanos", 10**9)
        yield Case(method, "", "ttl.nanos", -(2**31))
        yield Case(method, "", "ttl", {"seconds": 60, "nanos": -1}, "ttl.nanos")
    for method, path in ((APPEND, "name"), ("CacheService/Get", "name"), (TRUNCATE, "truncations[0].name")):
        yield Case(method, "", path, "")
        yield Case(method, "", path, "nothing", "", NOT_FOUND, "NOT_FOUND")
    for method, path in ((APPEND, "expected_length"), (TRUNCATE, "truncations[0].expected_length")):
        yield Case(method, "", path, 2**64 - 1, "", PRECONDITION, "UNEXPECTED_LENGTH")
    yield Case(FORK, "", "names", [])
    yield Case(FORK, "", "names", [""], "names[0]")
    yield Case(FORK, "", "names", ["nothing"], "", NOT_FOUND, "NOT_FOUND")
    yield Case(FORK, "", "names", ["nothing"] * 257)
    yield Case(APPEND, "", "layer", 1)
    yield Case(APPEND, "", "layer", 2**32 - 1)
    yield from (Case(APPEND, "", field, UNSET) for field in ("key", "value"))
    yield Case(APPEND, "", "key", tensor(HK, 1, D), "value.shape")
    yield Case(APPEND, "", "key", tensor(HK + 1, 0, D), "key.shape")
    yield Case(APPEND, "", "value", tensor(HK, 0, D, dtype=np.float16), "value.dtype")
    yield Case(TRUNCATE, "", "truncations[0].length", UNSET)
    yield Case(TRUNCATE, "", "truncations[0].length", S + 1)
    yield Case(TRUNCATE, "", "truncations[0].length", 2**64 - 1)
    for token in ("-1", "²", "1" * 21, "x"):
        yield Case("CacheService/List", "", "page_token", token)
    yield Case("CacheService/Delete", "", "names", [])
    yield Case("CacheService/Delete", "", "request_ids", [b""], "request_ids[0]")
    yield Case("CacheService/Delete", "", "request_ids", [bytes(65)], "request_ids[0]")


def of_layers() -> Iterator[Case]:
    yield Case("LayerService/Get", "", "name", "")
    yield Case("LayerService/Get", "", "name", "nobody", "", NOT_FOUND, "NOT_FOUND")
    load = "LayerService/Load"
    yield Case(load, "", "definitions", "")
    for path in ("../layers.toml", "/etc/passwd", "nothing.toml", "x" * 10_000, "a\0b"):
        code = NOT_FOUND if path in ("nothing.toml",) else None
        yield Case(
            load,
            "",
            "definitions",
            path,
            "" if code else None,
            code or INVALID,
            "NOT_FOUND" if code else "INVALID_FIELD",
        )
    yield Case(load, "", "names", ["nobody"])
    yield Case(load, "", "names", ["x"] * 2000, None, INVALID, "LIMIT_EXCEEDED")
    unload = "LayerService/Unload"
    yield Case(unload, "", "names", [])
    yield Case(unload, "", "names", ["nobody"], "", NOT_FOUND, "NOT_FOUND")
    yield Case(unload, "", "names", ["x"] * 2000, None, INVALID, "LIMIT_EXCEEDED")


CASES: Final = [
    *of_all_fields(),
    *of_attend(),
    *of_apply(),
    *of_streams(),
    *of_caches(),
    *of_layers(),
]


def put(message: Any, path: str, value: Any) -> None:
    """Sets the field at a path."""
    *parents, name = path.split(".")
    for parent in parents:
        field, _, index = parent.partition("[")
        message = getattr(message, field)
        if index:
            message = message[int(index[:-1])]
    field = message.DESCRIPTOR.fields_by_name[name]
    if value is UNSET:
        message.ClearField(name)
    elif field.is_repeated:
        message.ClearField(name)
        getattr(message, name).extend(value)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        new = value if isinstance(value, Message) else type(getattr(message, name))(**value)
        getattr(message, name).CopyFrom(new)
    else:
        setattr(message, name, value)


def rename(message: Any, names: dict[str, str]) -> None:
    """Replaces placeholder names with those of existing caches."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                rename(inner, names)
        elif field.name == "names":
            value[:] = [names.get(name, name) for name in value]
        elif field.name == "name" and value in names:
            setattr(message, field.name, names[value])


def sound(method: str, kind: str, caches: Caches) -> Any:
    """A sound request."""
    return requests(caches)[method][kind]


def broken(case: Case, caches: Caches) -> Any:
    """The request of a case."""
    message = sound(case.method, case.kind, PLACEHOLDERS)
    put(message, case.path, case.value)
    rename(message, {PLACEHOLDERS.plain: caches.plain, PLACEHOLDERS.decoder: caches.decoder})
    return message
