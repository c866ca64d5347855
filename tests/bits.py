"""Equality to the last bit, so that NaN equals itself and 0 differs from -0."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import Array


def bits(array: Array) -> Array:
    """The elements' bits as integers."""
    return np.ascontiguousarray(array).view(np.dtype(f"i{array.dtype.itemsize}"))


def assert_same_bits(one: Array, other: Array, what: str = "") -> None:
    """Asserts that two arrays are of one dtype and shape, and equal to the last bit."""
    assert one.dtype == other.dtype, what
    np.testing.assert_array_equal(bits(one), bits(other), err_msg=what)


def assert_same_results(one: Any, other: Any) -> None:
    """Asserts that two results hold the same: outputs, log-sum-exps and scores."""
    for name in ("output", "lse", "scores"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert_same_bits(a, b, name)
