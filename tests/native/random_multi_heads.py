"""Random multi-head layers on random sequences, in memory from any `Room`, and their results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final

import numpy as np
import oracle
from binding import BFLOAT, CANARY, DTYPES, NAN_BYTE, PACKED, Room, room
from oracle import Array
from random_products import tensor_at

from attnserve_server.native.library import Shape, Strides, Threads, pack
from attnserve_server.native.multi_head import PIECE, MultiHeads, packed_layer
from attnserve_server.native.products import PANEL, PackedWeight

FLOAT: Final = np.dtype(np.float32)
NEAR: Final[dict[np.dtype[Any], float]] = {FLOAT: 1e-5, np.dtype(np.float16): 3e-3, BFLOAT: 3e-2}
"""The largest error of a result relative to the largest result, or to 1: what is computed in between has the dtype of
the layer, too.
"""


@dataclass
class RandomMultiHead:
    """A layer as the library reads it, the rows of some sequences [n, inputs], and the expected result of each."""

    layer: bytes
    sequences: list[Array]
    expected: list[Array]
    room: Room
    alive: list[Any]

    def outcome(self, layers: MultiHeads, threads: Threads | None = None) -> tuple[list[Array], list[int]]:
        """The sequences' outputs, and which ones are invalid. Asserts that nothing was written around them."""
        outputs, memories = [], []
        for rows, expected in zip(self.sequences, self.expected, strict=True):
            output, memory = self.room((1, len(rows), expected.shape[1]), rows.dtype, PACKED, CANARY)
            outputs.append(output[0])
            memories.append(memory)
        pieces = bytearray().join(
            PIECE.pack(rows.ctypes.data, output.ctypes.data, len(rows), 1)
            for rows, output in zip(self.sequences, outputs, strict=True)
        )
        broken = layers.apply(self.layer, pieces, threads)
        found = [output.copy() for output in outputs]
        for output, memory in zip(outputs, memories, strict=True):
            output[...] = np.frombuffer(bytes([CANARY] * output.itemsize), output.dtype)[0]
            assert (memory == CANARY).all(), "something was written beside a result"
        return found, broken

    def assert_right(self, outcome: tuple[list[Array], list[int]]) -> None:
        """Asserts that all outputs are finite and match the oracle's."""
        found, broken = outcome
        assert not broken
        for one, expected in zip(found, self.expected, strict=True):
            near = NEAR[one.dtype] * max(1.0, float(np.abs(expected).max(initial=0)))
            np.testing.assert_allclose(one.astype(np.float64), expected, rtol=0, atol=near)


def random_multi_head(
    random: Random, lengths: tuple[int, ...] = (), room: Room = room, dtype: np.dtype[Any] | None = None
) -> RandomMultiHead:
    """A random layer, of a dtype or of any, on sequences of these lengths, or of random ones."""
    draw, alive = np.random.default_rng(random.getrandbits(64)), []
    dtype = dtype or random.choice((FLOAT, *DTYPES))

    def laid(array: Array, dtype: np.dtype[Any] = dtype) -> Array:
        copy, memory = room(array.shape if array.ndim == 3 else (1, *array.shape), dtype, PACKED, NAN_BYTE)
        copy[...] = array
        alive.append(memory)
        return copy if array.ndim == 3 else np.asarray(copy[0])

    def weight(inputs: int, outputs: int, biased: bool) -> tuple[PackedWeight, Array, Array | float]:
        """A weight packed and as [outputs, inputs], and its bias."""
        panels = laid(draw.standard_normal((outputs // PANEL, inputs, PANEL), np.float32) / np.float32(inputs**0.5))
        bias = laid(draw.standard_normal((1, outputs), np.float32), FLOAT)[0] if biased else None
        packed = PackedWeight(tensor_at(panels), None if bias is None else tensor_at(bias))
        plain = panels.astype(np.float64).transpose(0, 2, 1).reshape(outputs, inputs)
        return packed, plain, 0.0 if bias is None else bias.astype(np.float64)

    inputs, kv_heads, width, value_width = (random.choice(each) for each in ([1, 16, 50, 300], [1, 2], [3, 16], [1, 8]))
    heads = kv_heads * random.choice((1, 3))
    columns = (0, _whole(heads * width), _whole(heads * width) + _whole(kv_heads * width))
    total = columns[2] + _whole(kv_heads * value_width)
    project, project_weight, project_bias = weight(inputs, total, random.random() < 0.7)
    output, output_weight, output_bias = None, np.eye(heads * value_width), 0.0
    if random.random() < 0.7:
        biased = random.random() < 0.5
        output, output_weight, output_bias = weight(heads * value_width, PANEL * random.randint(1, 5), biased)
    alive += [project, output]
    left, right = random.choice([(-1, -1), (-1, 0), (3, 2)])
    shape = Shape(
        query_length=0, kv_length=0, offset=0, query_heads=heads, kv_heads=kv_heads, head_dim=width,
        value_dim=value_width, query_dtype=DTYPES[dtype], kv_dtype=DTYPES[dtype], page_tokens=0,
        query=Strides(total, width), key=Strides(total, width), value=Strides(total, value_width),
        output=Strides(heads * value_width, value_width), lse_head=0, mask=(0, 0, 0), bias=(0, 0, 0), left=left,
        right=right, scale=width**-0.5, softcap=0.0,
    )  # fmt: skip
    chosen = lengths or tuple(random.choice((1, 2, 7, 16, 33, 70)) for _ in range(random.randint(1, 5)))
    sequences = [laid(draw.standard_normal((length, inputs), np.float32)) for length in chosen]
    expected = []
    for rows in sequences:
        projected = rows.astype(np.float64) @ project_weight.T + project_bias
        query, key, value = (
            projected[:, begin : begin + count * each].reshape(len(rows), count, each).swapaxes(0, 1)
            for begin, count, each in zip(
                columns, (heads, kv_heads, kv_heads), (width, width, value_width), strict=True
            )
        )
        attended = oracle.attend(query, key, value, window=(left, right)).output
        flat = attended.swapaxes(0, 1).reshape(len(rows), heads * value_width)
        expected.append(flat @ output_weight.T + output_bias)
    layer = packed_layer(project, columns, output, pack((0,) * 9, shape.packed()))
    return RandomMultiHead(layer, sequences, expected, room, alive)


def _whole(width: int) -> int:
    return -(-width // PANEL) * PANEL
