"""Whether what is appended lies within the range of the dtype in which a cache stores it.

In: keys and values where they were received. Out: nothing, or InvalidRequest: a finite element would be stored as an
infinity, of which nobody would learn before attention gives NaN. Infinities and NaN are stored as they are. Where the
dtype of a cache has the range of what comes, nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from attnserve import _dtypes
from attnserve.v1 import tensor_pb2 as pb
from attnserve_server.caches.shape import CacheDtype
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.tensors import TensorSpec

FEW_BYTES: Final = 1 << 20
"""Looking at so many takes some tenths of a millisecond: it is done on the event loop, where the error is of one
request, and nothing has begun. More are looked at where they are written.
"""

_INFINITE_FROM: Final[dict[CacheDtype, float]] = {
    "float32": (2 - 2.0**-24) * 2.0**127,
    "float16": 65520.0,
    "bfloat16": (2 - 2.0**-8) * 2.0**127,
}
"""The least magnitude that is rounded to infinity: half a step above the largest number."""

_WIDER: Final[dict[CacheDtype, frozenset[int]]] = {
    "float32": frozenset((pb.DATA_TYPE_FLOAT64,)),
    "float16": frozenset((pb.DATA_TYPE_FLOAT64, pb.DATA_TYPE_FLOAT32, pb.DATA_TYPE_BFLOAT16)),
    "bfloat16": frozenset((pb.DATA_TYPE_FLOAT64, pb.DATA_TYPE_FLOAT32)),
}
"""The dtypes that have finite numbers of such magnitudes."""


def check_few(tensors: Mapping[str, TensorSpec], payloads: Sequence[memoryview], dtype: CacheDtype) -> None:
    """As `check_many`, for a request that appends little."""
    if _are_wider(tensors, dtype) and _are_few(tensors):
        _check(tensors, payloads, dtype)


def check_many(tensors: Mapping[str, TensorSpec], payloads: Sequence[memoryview], dtype: CacheDtype) -> None:
    """Raises InvalidRequest if keys or values have a finite element that would be stored as an infinity; for a request
    that appends much, before any of it is written.
    """
    if _are_wider(tensors, dtype) and not _are_few(tensors):
        _check(tensors, payloads, dtype)


def _are_wider(tensors: Mapping[str, TensorSpec], dtype: CacheDtype) -> bool:
    """Whether there are keys and values of a dtype with a wider range; both have the same one."""
    return "key" in tensors and tensors["key"].dtype in _WIDER[dtype]


def _are_few(tensors: Mapping[str, TensorSpec]) -> bool:
    return tensors["key"].size + tensors["value"].size <= FEW_BYTES


def _check(tensors: Mapping[str, TensorSpec], payloads: Sequence[memoryview], dtype: CacheDtype) -> None:
    limit = _INFINITE_FROM[dtype]
    for name in ("key", "value"):
        spec = tensors[name]
        if spec.payload < 0 or not spec.size:
            continue
        array: Any = np.frombuffer(payloads[spec.payload], _dtypes.NUMPY[spec.dtype])
        if spec.dtype == pb.DATA_TYPE_BFLOAT16:
            array = array.astype(np.float32)  # of which NumPy finds the largest several times as fast
        with np.errstate(invalid="ignore"):
            if -limit < array.min() and array.max() < limit:  # neither is so if there is a NaN
                continue
            beyond = array[np.isfinite(array) & (np.abs(array) >= limit)]
        if len(beyond):
            expected = f"elements within the range of {dtype}, in which the cache stores them"
            raise InvalidRequest(name, expected, f"one of {float(beyond[0]):.4g}")
