"""Requests with every field that a request can have, and copies with one field changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import messages
import numpy as np

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

B, HQ, HK, LQ, S, D, DK, DV, U = 2, 4, 2, 3, 5, 8, 7, 6, 9
FLOAT, MASK, INT = np.dtype(np.float32), np.dtype(bool), np.dtype(np.int64)


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
"""Every tensor of a request, with a base that has it and a dtype that it may have."""


def at(message: Any, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
    return message


def broken(base: str, path: str, value: Any) -> pb.AttendRequest:
    """The base with its field at `path` set to a value."""
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
