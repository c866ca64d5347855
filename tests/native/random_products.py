"""Random products of rows with weights, and their results in float64."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from binding import NAN_BYTE, PACKED, Place, room
from oracle import Array

from attnserve_server.native.products import PANEL, PackedWeight

Room = Callable[[tuple[int, ...], np.dtype[np.float32], Place, int], tuple[Array, Array]]
FLOAT = np.dtype(np.float32)


class RandomProduct(NamedTuple):
    """A weight, rows [n, inputs], their product in float64 and that of magnitudes. `alive` keeps their memory."""

    weight: PackedWeight
    rows: torch.Tensor
    expected: Array
    magnitude: Array
    alive: list[Array]

    def assert_right(self, found: torch.Tensor) -> None:
        """Asserts agreement within float32's error for a sum of this many products."""
        assert found.shape == self.expected.shape
        assert (np.abs(found.numpy() - self.expected) <= 5e-7 * self.magnitude).all()


def random_product(random: Random, counts: tuple[int, ...] = (), room: Room = room) -> RandomProduct:
    """One, in memory from `room`: any number of rows, or one of `counts`, at any address and with gaps in between."""
    draw = np.random.default_rng(random.getrandbits(64))
    inputs = random.choice([1, 15, 16, 17, 64, 255, 256, 257, 300, 513, 600])
    outputs, count = PANEL * random.randint(1, 9), random.choice(counts or (*range(1, 31), 55, 56, 57, 113, 130))
    weight, alive = _laid(draw.standard_normal((outputs // PANEL, inputs, PANEL), np.float32), PACKED, room)
    bias = None
    if random.random() < 0.6:
        bias, memory = _laid(draw.standard_normal((1, 1, outputs), np.float32), PACKED, room)
        alive += memory
    place = Place(token_gap=random.choice((0, 0, 3, 16)), address=random.choice((0, 0, 4, 1)))
    rows, memory = _laid(draw.standard_normal((1, count, inputs), np.float32), place, room)
    factors = rows[0].astype(np.float64), weight.astype(np.float64).transpose(1, 0, 2).reshape(inputs, outputs)
    expected, magnitude = factors[0] @ factors[1], np.abs(factors[0]) @ np.abs(factors[1])
    if bias is not None:
        expected += bias[0, 0]
        magnitude += np.abs(bias[0, 0])
    packed = PackedWeight(torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias[0, 0]))
    return RandomProduct(packed, torch.from_numpy(rows[0]), expected, magnitude, alive + memory)


def _laid(array: Array, place: Place, room: Room) -> tuple[Array, list[Array]]:
    """A copy of an array of rank 3 surrounded by NaN, and the memory that it lies in."""
    copy, memory = room(array.shape, FLOAT, place, NAN_BYTE)
    copy[...] = array
    return copy, [memory]
