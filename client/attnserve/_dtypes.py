"""The dtypes of the wire: the enum of the protocol, the NumPy dtype, and nothing else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from attnserve.v1 import tensor_pb2 as pb

NUMPY: dict[int, np.dtype[Any]] = {
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    pb.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    pb.DATA_TYPE_FLOAT64: np.dtype("<f8"),
    pb.DATA_TYPE_BOOL: np.dtype("?"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
}
"""The NumPy dtype of each wire dtype."""

WIRE: dict[np.dtype[Any], int] = {dtype: value for value, dtype in NUMPY.items()}
"""The wire dtype of each NumPy dtype."""

FLOATING: frozenset[int] = frozenset(
    (pb.DATA_TYPE_FLOAT32, pb.DATA_TYPE_FLOAT16, pb.DATA_TYPE_BFLOAT16, pb.DATA_TYPE_FLOAT64)
)
"""The dtypes that queries, keys, values and parameters may have."""


def name(value: int) -> str:
    """The dtype's usual name, such as ``float32``; ``unknown (17)`` for a number that is no dtype."""
    dtype = NUMPY.get(value)
    return f"unknown ({value})" if dtype is None else str(dtype.name)
