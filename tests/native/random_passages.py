"""Random passages from one attention to the next, in memory from any `Room`, and their results in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import numpy as np
import torch
from binding import BFLOAT, DTYPES, NAN_BYTE, PACKED, Room, room
from kernel_calls import array
from oracle import Array
from random_products import tensor_at

from attnserve_server.native.passages import ACTIVATION_CODES, Forward, Norm, Passage, Passages, Turning
from attnserve_server.native.products import PANEL, PackedWeight

FLOAT: Final = np.dtype(np.float32)
NEAR: Final[dict[np.dtype[Any], float]] = {FLOAT: 1e-5, np.dtype(np.float16): 4e-3, BFLOAT: 3e-2}
"""The largest error of a result relative to the largest result, or to 1: what is computed in between has the dtype of
the rows, too.
"""

Linear = Callable[[Array], Array]


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


class _Maker:
    """Makes the pieces of a passage for rows of a width, in memory from `room`."""

    def __init__(self, random: Random, dtype: np.dtype[Any], room: Room) -> None:
        self.random, self.dtype, self._room = random, dtype, room
        self._draw = np.random.default_rng(random.getrandbits(64))
        self.width = PANEL * random.choice((1, 2, 3, 8))
        self.alive: list[Any] = []

    def laid(self, *shape: int, dtype: np.dtype[Any] | None = None, scale: float = 1.0) -> Array:
        """Random numbers [1, n, width], or of rank 2 without the first axis."""
        drawn = self._draw.standard_normal(shape, np.float32) * np.float32(scale)
        copy, memory = self._room(shape if len(shape) == 3 else (1, *shape), dtype or self.dtype, PACKED, NAN_BYTE)
        copy[...] = drawn
        self.alive.append(memory)
        return copy if len(shape) == 3 else np.asarray(copy[0])

    def linear(self, inputs: int, outputs: int) -> tuple[PackedWeight, Linear]:
        """A weight packed, and the map in float64."""
        panels = self.laid(outputs // PANEL, inputs, PANEL, scale=inputs**-0.5)
        bias = self.laid(1, outputs, dtype=FLOAT)[0] if self.random.random() < 0.5 else None
        packed = PackedWeight(tensor_at(panels), None if bias is None else tensor_at(bias))
        plain = panels.astype(np.float64).transpose(0, 2, 1).reshape(outputs, inputs)
        shift = 0.0 if bias is None else bias.astype(np.float64)
        return packed, lambda rows: rows @ plain.T + shift

    def norm(self, likely: float) -> Norm | None:
        """One, or none."""
        if self.random.random() > likely:
            return None
        weight, bias = (
            torch.from_numpy(self.laid(1, self.width, dtype=FLOAT)[0]) if self.random.random() < 0.7 else None
            for _ in range(2)
        )
        return Norm(self.random.choice(("layer", "rms")), weight, bias, self.random.choice((1e-12, 1e-5)))

    def output(self, count: int) -> tuple[PackedWeight | None, torch.Tensor, Array]:
        """The projection of what an attention gives, if there is one; that, and the result."""
        if self.random.random() < 0.2:
            given = self.laid(count, self.width)
            return None, tensor_at(given), given.astype(np.float64)
        across = self.random.choice((16, 33, 80))
        weight, apply = self.linear(across, self.width)
        given = self.laid(count, across)
        return weight, tensor_at(given), apply(given.astype(np.float64))

    def forward(self, rows: Array) -> tuple[Forward, Array]:
        """A feed-forward part, and rows behind it."""
        gated, hidden = self.random.random() < 0.5, PANEL * self.random.choice((1, 3, 20))
        name, before, behind = self.random.choice(list(ACTIVATION_CODES)), self.norm(0.5), self.norm(0.5)
        up, apply_up = self.linear(self.width, hidden * (2 if gated else 1))
        down, apply_down = self.linear(hidden, self.width)
        units = apply_up(normed(before, rows))
        units = activated(name, units[:, :hidden]) * (units[:, hidden:] if gated else 1.0)
        return Forward(before, up, name, gated, down, behind), normed(behind, rows + apply_down(units))

    def turnings(self) -> tuple[Turning | None, Turning | None]:
        """Rotations of queries, of keys, or of both, in rows of 144 columns."""
        head_dim = self.random.choice((16, 48, 72))
        across, interleaved = 2 * self.random.randint(1, head_dim // 2), self.random.random() < 0.5
        query, key = (Turning(at, 72 // head_dim, head_dim, across, interleaved) for at in (0, 72))
        return self.random.choice(((query, key), (query, key), (query, None), (None, key)))


def random_passage(
    random: Random, counts: tuple[int, ...] = (), room: Room = room, dtype: np.dtype[Any] | None = None
) -> RandomPassage:
    """One of any kind, in memory from `room`: any number of rows, or one of `counts`; of a dtype, or of any."""
    make = _Maker(random, dtype or random.choice((FLOAT, *DTYPES)), room)
    count = random.choice(counts or (*range(1, 20), 57, 120))
    x = make.laid(count, make.width)
    rows, behind = tensor_at(x), x.astype(np.float64)
    attended = output = behind_attention = forward = following = rotations = None
    turnings: tuple[Turning | None, Turning | None] = (None, None)
    if random.random() < 0.8:
        output, attended, part = make.output(count)
        behind_attention = make.norm(0.5)
        behind = normed(behind_attention, behind + part)
        if random.random() < 0.8:
            forward, behind = make.forward(behind)
    before = make.norm(0.6)
    ready = normed(before, behind)
    if random.random() < 0.8:
        following, apply = make.linear(make.width, 144)
        ready = apply(ready)
        if random.random() < 0.6:
            turnings = make.turnings()
            given = [each for each in turnings if each is not None]
            rotations = torch.from_numpy(make.laid(count, given[0].width, dtype=FLOAT))
            for each in given:
                turned(each, ready, rotations.numpy().astype(np.float64))
    passage = Passage(
        width=make.width,
        dtype=rows.dtype,
        output=output,
        behind=behind_attention,
        forward=forward,
        before=before,
        following=following,
        turnings=turnings,
    )
    return RandomPassage(passage, rows, attended, rotations, (behind, ready), make.alive)
