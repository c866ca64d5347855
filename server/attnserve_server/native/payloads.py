"""Tensors of requests as the native kernel reads them: where they were received, by addresses and strides.

In: a problem and the payloads of a request. Out: addresses, strides, and copies of tensors of other dtypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnserve import _dtypes
from attnserve._wire import Payloads
from attnserve.v1 import tensor_pb2 as pb
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.native.library import BFLOAT16, FLOAT16, FLOAT32, Keys, Shape, Strides, supports
from attnserve_server.requests.problem import Problem

NATIVE_FROM_WIRE: Final[dict[int, int]] = {
    pb.DATA_TYPE_FLOAT32: FLOAT32,
    pb.DATA_TYPE_FLOAT16: FLOAT16,
    pb.DATA_TYPE_BFLOAT16: BFLOAT16,
}
"""The wire's dtypes that the library computes with, as it encodes them."""
address_of_bytes: Final = ctypes.pythonapi.PyBytes_AsString
"""The address of the content of `bytes`."""
address_of_bytes.argtypes, address_of_bytes.restype = [ctypes.py_object], ctypes.c_void_p


def applies(problem: Problem) -> bool:
    """Whether the native kernel computes such requests."""
    if problem.dtype not in NATIVE_FROM_WIRE or problem.return_scores is not None:
        return False
    hides = not problem.tensors.keys().isdisjoint(("mask", "bias"))
    return supports(
        problem, max(problem.head_dim, problem.value_dim), hides=hides, alibi="alibi_slopes" in problem.tensors
    )


def shape_of(problem: Problem, query_length: int, keys: Keys) -> bytes:
    """The packed shape of the call for a sequence of `query_length` queries over some keys."""
    heads, rows = problem.query_heads, problem.query_length
    return Shape(
        query_length=query_length,
        kv_length=keys.length,
        offset=keys.offset,
        query_heads=heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        query_dtype=NATIVE_FROM_WIRE[problem.dtype],
        kv_dtype=keys.dtype,
        page_tokens=keys.page_tokens,
        query=strides_of(problem, heads, rows, problem.head_dim),
        key=keys.key,
        value=keys.value,
        output=strides_of(problem, heads, rows, problem.value_dim),
        lse_head=rows,
        mask=broadcast_strides(problem, "mask")[1:],
        bias=broadcast_strides(problem, "bias")[1:],
        left=problem.window[0],
        right=problem.window[1],
        scale=problem.scale,
        softcap=problem.softcap,
    ).packed()


def strides_of(problem: Problem, heads: int, length: int, width: int) -> Strides:
    """The strides of a packed tensor of `heads` heads and `length` tokens, in the layout of a problem."""
    return Strides(heads * width, width) if problem.tokens_first else Strides(width, length * width)


def broadcast_strides(problem: Problem, name: str) -> tuple[int, ...]:
    """The strides of a mask or bias along its 4 axes, 0 where it is broadcast."""
    spec = problem.tensors.get(name)
    if spec is None:
        return 0, 0, 0, 0
    shape, strides, step = (1,) * (4 - len(spec.shape)) + spec.shape, [], 1
    for length in reversed(shape):
        strides.append(step if length > 1 else 0)
        step *= length
    return tuple(reversed(strides))


class More(NamedTuple):
    """The addresses of what a request has beside query, key and value, 0 where it has no such tensor. Some may be
    converted copies, which are there as long as `alive` is.
    """

    mask: int = 0
    bias: int = 0
    alibi_slopes: int = 0
    sinks: int = 0
    alive: object = None


NOTHING_MORE: Final = More()


def more_of(problem: Problem, payloads: Payloads) -> More:
    """What a request has beside query, key and value."""
    mask = problem.tensors.get("mask")
    alive = [_floats(problem, payloads, name) for name in ("bias", "alibi_slopes", "sinks")]
    bias, slopes, sinks = (0 if each is None else address_of(each) for each in alive)
    return More(0 if mask is None else address(payloads, mask.payload), bias, slopes, sinks, alive)


def _floats(problem: Problem, payloads: Sequence[memoryview], name: str) -> NDArray[Any] | None:
    """A bias, slopes or sinks as float32, where what was finite stays finite."""
    spec = problem.tensors.get(name)
    if spec is None:
        return None
    array = np.frombuffer(payloads[spec.payload] if spec.payload >= 0 else b"", _dtypes.NUMPY[spec.dtype])
    if spec.dtype == pb.DATA_TYPE_FLOAT32:
        return array
    if spec.dtype == pb.DATA_TYPE_FLOAT64:
        largest = np.finfo(np.float32).max
        array = np.where(np.isfinite(array), array.clip(-largest, largest), array)
    return array.astype(np.float32)


def addresses(payloads: Payloads, places: Sequence[int]) -> list[int]:
    """The addresses of payloads, computed from that of the `bytes` that have them: this takes a tenth of the time that
    NumPy takes for the address of a view. Payloads without elements get an arbitrary one.
    """
    begin: int = address_of_bytes(payloads.buffer) + payloads.at
    return [begin + payloads.places[place][0] if place >= 0 else CACHE_LINE for place in places]


def address(payloads: Payloads, place: int) -> int:
    """The address of one payload."""
    return addresses(payloads, (place,))[0]


def memory_of(size: int) -> tuple[memoryview, int]:
    """Memory to be written to, and its address."""
    array = np.empty(max(size, 1), np.uint8)
    memory = memoryview(array)  # type: ignore[arg-type]
    return memory[:size], ctypes.addressof(ctypes.c_char.from_buffer(memory))


def address_of(array: NDArray[Any]) -> int:
    """The address of an array: that of `ctypes.data`, in half the time."""
    found: int = array.__array_interface__["data"][0]
    return found


def aligned(size: int) -> int:
    """`size` rounded up to whole cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE
