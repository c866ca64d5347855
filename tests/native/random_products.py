"""Random products of rows with weights, and their results in float64."""

from __future__ import annotations

from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from binding import BFLOAT, DTYPES, HALF_A_UNIT, NAN_BYTE, PACKED, Place, Room, room
from kernel_calls import array
from oracle import Array

from attnserve_server.native.products import PANEL, PackedWeight

FLOAT: Final = np.dtype(np.float32)


class RandomProduct(NamedTuple):
    """A weight, rows [n, inputs] of the same dtype, their product in float64 and that of magnitudes; how much, in
    relation to it, a result may change by rounding to the dtype. `alive` keeps their memory.
    """

    weight: PackedWeight
    rows: torch.Tensor
    expected: Array
    magnitude: Array
    half_a_unit: float
    alive: list[Array]

    def assert_right(self, found: torch.Tensor) -> None:
        """Asserts agreement within float32's error for a sum of this many products, and that of rounding it."""
        assert (found.shape, found.dtype) == (self.expected.shape, self.rows.dtype)
        of_sum = 5e-7 * self.magnitude
        error = of_sum + self.half_a_unit * (np.abs(self.expected) + of_sum)
        if found.dtype == torch.float16:
            error += 2.0**-25  # half of the dtype's smallest number
        assert (np.abs(array(found).astype(np.float64) - self.expected) <= error).all()


def random_product(
    random: Random,
    counts: tuple[int, ...] = (),
    room: Room = room,
    dtype: np.dtype[Any] | None = None,
    amx: bool = False,
) -> RandomProduct:
    """One, in memory from `room`: any number of rows, or one of `counts`, at any address and with gaps in between; of a
    dtype, or of any. By AMX, if that is asked for, with weights in memory of their own.
    """
    draw, dtype = np.random.default_rng(random.getrandbits(64)), dtype or random.choice((FLOAT, *DTYPES))
    inputs = random.choice([1, 15, 16, 17, 64, 255, 256, 257, 300, 513, 600])
    outputs = PANEL * random.choice((*range(1, 10), 40))  # with 40 panels, two threads divide the columns of few rows
    count = random.choice(counts or (*range(1, 31), 55, 56, 57, 113, 130))
    weight, alive = _laid(_normal(draw, dtype, outputs // PANEL, inputs, PANEL), PACKED, room)
    bias = None
    if random.random() < 0.6:
        bias, memory = _laid(_normal(draw, FLOAT, 1, 1, outputs), PACKED, room)
        alive += memory
    place = Place(token_gap=random.choice((0, 0, 3, 16)), address=random.choice((0, 0, 4, 1)))
    rows, memory = _laid(_normal(draw, dtype, 1, count, inputs), place, room)
    factors = rows[0].astype(np.float64), weight.astype(np.float64).transpose(1, 0, 2).reshape(inputs, outputs)
    expected, magnitude = factors[0] @ factors[1], np.abs(factors[0]) @ np.abs(factors[1])
    if bias is not None:
        expected += bias[0, 0]
        magnitude += np.abs(bias[0, 0])
    packed = PackedWeight(tensor_at(weight), None if bias is None else tensor_at(bias[0, 0]))
    if amx:
        plain = tensor_at(np.ascontiguousarray(weight.swapaxes(1, 2).reshape(outputs, inputs)))
        packed = PackedWeight.of(plain, None if bias is None else tensor_at(bias[0, 0]), amx=True)
    return RandomProduct(packed, tensor_at(rows[0]), expected, magnitude, HALF_A_UNIT[dtype], alive + memory)


def tensor_at(array: Array) -> torch.Tensor:
    """An array as a tensor that shares its memory."""
    if array.dtype == BFLOAT:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _normal(draw: np.random.Generator, dtype: np.dtype[Any], *shape: int) -> Array:
    return draw.standard_normal(shape, np.float32).astype(dtype)


def _laid(array: Array, place: Place, room: Room) -> tuple[Array, list[Array]]:
    """A copy of an array of rank 3 surrounded by NaN, and the memory that it lies in."""
    copy, memory = room(array.shape, array.dtype, place, NAN_BYTE)
    copy[...] = array
    return copy, [memory]
