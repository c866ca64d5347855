"""Random passages from one attention to the next, in memory from any `Room`, and their results in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import numpy as np
import torch
from binding import BFLOAT, DTYPES, NAN_BYTE, PACKED, Room, room
from kernel_calls import array
from oracle import Array
from random_products import tensor_at

from attnserve_server.native.passages import ACTIVATIONS, Forward, Norm, Passage, Passages, Turning
from attnserve_server.native.products import PANEL, PackedWeight

FLOAT: Final = np.dtype(np.float32)
NEAR: Final[dict[np.dtype[Any], float]] = {FLOAT: 1e-5, np.dtype(np.float16): 4e-3, BFLOAT: 3e-2}
"""The largest error of a result relative to the largest result, or to 1: what is computed in between has the dtype of
the rows, too.
"""


def activated(name: str, x: Array) -> Array:
    """An activation in float64."""
    if name == "relu":
        return np.maximum(x, 0.0)
    if name == "gelu":
        return x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))
    u = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) if name == "gelu_tanh" else x
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-u)))


def normed(norm: Norm | None, x: Array) -> Array:
    """Rows after a norm, in float64."""
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(1, keepdims=True)
    x = x / np.sqrt((x * x).mean(1, keepdims=True) + norm.epsilon)
    for parameter, apply in ((norm.weight, np.multiply), (norm.bias, np.add)):
        if parameter is not None:
            x = apply(x, parameter.numpy().astype(np.float64))
    return x


def turned(turning: Turning, projected: Array, rotations: Array) -> None:
    """Rotates heads in place."""
    pairs = turning.width // 2
    cos, sin = rotations[:, None, :pairs], rotations[:, None, pairs:]
    columns = slice(turning.column, turning.column + turning.heads * turning.head_dim)
    heads = projected[:, columns].reshape(len(projected), turning.heads, turning.head_dim)
    first, second = slice(0, pairs), slice(pairs, turning.width)
    if turning.interleaved:
        first, second = slice(0, turning.width, 2), slice(1, turning.width, 2)
    x, y = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first], heads[..., second] = x * cos - y * sin, y * cos + x * sin
    projected[:, columns] = heads.reshape(len(projected), -1)


@dataclass
class RandomPassage:
    """A passage, what it is given, and what should become of that: the rows behind it, and what it ends with."""

    passage: Passage
    rows: torch.Tensor
    attended: torch.Tensor | None
    rotations: torch.Tensor | None
    expected: tuple[Array, Array]
    alive: list[Any]

    def given(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Some of the rows."""
        others = [None if each is None else each[rows] for each in (self.attended, self.rotations)]
        return self.rows[rows], others[0], others[1]

    def outcome(self, passages: Passages, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """What the library makes of some of the rows."""
        return passages.run(self.passage, *self.given(rows))

    def assert_right(self, outcome: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Asserts that an outcome is what it should be."""
        for tensor, expected in zip(outcome, self.expected, strict=True):
            found = array(tensor)
            near = NEAR[found.dtype] * max(1.0, float(np.abs(expected).max(initial=0)))
            np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=near)


def random_passage(
    random: Random, counts: tuple[int, ...] = (), room: Room = room, dtype: np.dtype[Any] | None = None
) -> RandomPassage:
    """One of any kind, in memory from `room`: any number of rows, or one of `counts`; of a dtype, or of any."""
    draw, alive = np.random.default_rng(random.getrandbits(64)), []
    dtype = dtype or random.choice((FLOAT, *DTYPES))

    def laid(array: Array, dtype: np.dtype[Any] = dtype) -> Array:
        copy, memory = room(array.shape if array.ndim == 3 else (1, *array.shape), dtype, PACKED, NAN_BYTE)
        copy[...] = array
        alive.append(memory)
        return copy if array.ndim == 3 else np.asarray(copy[0])

    def weight(inputs: int, outputs: int) -> tuple[PackedWeight, Array, Array | float]:
        """A weight packed and as [outputs, inputs], and its bias."""
        panels = laid(draw.standard_normal((outputs // PANEL, inputs, PANEL), np.float32) / np.float32(inputs**0.5))
        bias = laid(draw.standard_normal((1, outputs), np.float32), FLOAT)[0] if random.random() < 0.5 else None
        packed = PackedWeight(tensor_at(panels), None if bias is None else tensor_at(bias))
        plain = panels.astype(np.float64).transpose(0, 2, 1).reshape(outputs, inputs)
        return packed, plain, 0.0 if bias is None else bias.astype(np.float64)

    def norm(likely: float) -> Norm | None:
        if random.random() > likely:
            return None
        parameters = [
            torch.from_numpy(laid(draw.standard_normal((1, width), np.float32), FLOAT)[0])
            if random.random() < 0.7
            else None
            for _ in range(2)
        ]
        return Norm(random.choice(("layer", "rms")), *parameters, random.choice((1e-12, 1e-5)))

    width = PANEL * random.choice((1, 2, 3, 8))
    count = random.choice(counts or (*range(1, 20), 57, 120))
    x = laid(draw.standard_normal((count, width), np.float32))
    rows, behind = tensor_at(x), x.astype(np.float64)
    attended = output = behind_attention = forward = following = None
    if random.random() < 0.8:
        across = width
        of_output: tuple[Array, Array | float] | None = None
        if random.random() < 0.8:
            across = random.choice((16, 33, 80))
            output, *of_output = weight(across, width)  # type: ignore[assignment]
        behind_attention = norm(0.5)
        y = laid(draw.standard_normal((count, across), np.float32))
        attended, part = tensor_at(y), y.astype(np.float64)
        if of_output is not None:
            part = part @ of_output[0].T + of_output[1]
        behind = normed(behind_attention, behind + part)
        if random.random() < 0.8:
            gated, hidden = random.random() < 0.5, PANEL * random.choice((1, 3, 20))
            before, behind_forward = norm(0.5), norm(0.5)
            up, up_weight, up_bias = weight(width, hidden * (2 if gated else 1))
            down, down_weight, down_bias = weight(hidden, width)
            name = random.choice(list(ACTIVATIONS))
            units = normed(before, behind) @ up_weight.T + up_bias
            units = activated(name, units[:, :hidden]) * (units[:, hidden:] if gated else 1.0)
            behind = normed(behind_forward, behind + units @ down_weight.T + down_bias)
            forward = Forward(before, up, name, gated, down, behind_forward)
    before_next = norm(0.6)
    ready, rotations = normed(before_next, behind), None
    turnings: tuple[Turning | None, Turning | None] = (None, None)
    if random.random() < 0.8:
        following, next_weight, next_bias = weight(width, PANEL * 9)
        ready = ready @ next_weight.T + next_bias
        if random.random() < 0.6:
            head_dim = random.choice((16, 48, 72))
            across, interleaved = 2 * random.randint(1, head_dim // 2), random.random() < 0.5
            one = Turning(0, 48 // head_dim or 1, head_dim, across, interleaved)
            other = Turning(72, 72 // head_dim, head_dim, across, interleaved) if random.random() < 0.7 else None
            turnings, turning = (one, other), laid(draw.standard_normal((count, across), np.float32), FLOAT)
            rotations = torch.from_numpy(turning)
            for each in (one, other):
                if each is not None:
                    turned(each, ready, turning.astype(np.float64))
    passage = Passage(
        width=width,
        dtype=rows.dtype,
        output=output,
        behind=behind_attention,
        forward=forward,
        before=before_next,
        following=following,
        turnings=turnings,
    )
    return RandomPassage(passage, rows, attended, rotations, (behind, ready), alive)
