"""From one attention of a stack to the next: everything between them is a function of rows.

That is the rest of the first attention (its output projection, residual and norm, then the feed-forward part, if it is
the block's last) and the beginning of the second (norm and projections). The native library computes it in one call, if
it multiplies the layer's weights and all widths are whole vectors. Otherwise torch does, in one row function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.layers.block import Residual, Step
from attnserve_server.layers.norms import NormRows
from attnserve_server.layers.product import NativeProduct, Product
from attnserve_server.layers.projection import WIDTH
from attnserve_server.native import passages as native
from attnserve_server.native.products import PackedWeight


class Passage(Protocol):
    """What leads from an attention to the next, from the beginning of a stack to its first attention, or from its last
    attention to its end.
    """

    def __call__(
        self, rows: torch.Tensor, attended: torch.Tensor | None, rotations: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From rows [n, width] before the first attention and its outputs [n, Hq Dv], to rows [n, width] before the
        second and their projections for it: those of `MultiHead.project`, or of `project_queries`. At the end of a
        stack the latter are its outputs [n, width].

        `attended` is None at the beginning. `rotations` are those of the second attention, if it has any.
        """


def passages_of(
    steps: Sequence[Step], final_norm: NormRows | None, width: int, dtype: torch.dtype, compute: Compute
) -> list[Passage]:
    """The passages of a stack, one more than it has steps."""
    edges = list(zip([None, *steps], [*steps, None], strict=True))
    if compute.native is not None:
        of_library = [_native(compute.native.passages, left, right, final_norm, width, dtype) for left, right in edges]
        found = [each for each in of_library if each is not None]
        if len(found) == len(edges):
            return list(found)
    return [_OfTensors(compute, left, right, final_norm) for left, right in edges]


def packed_passages(passages: Sequence[Passage]) -> list[native.Passage] | None:
    """The passages as the native library reads them; None if it does not compute all of them."""
    found = [each.passage for each in passages if isinstance(each, _OfLibrary)]
    return found if len(found) == len(passages) else None


class _OfTensors:
    """A passage by torch."""

    def __init__(self, compute: Compute, left: Step | None, right: Step | None, final_norm: NormRows | None) -> None:
        self._compute, self._left, self._right, self._final_norm = compute, left, right, final_norm
        self._row_flops = (0 if left is None else left.leave_flops) + (0 if right is None else right.enter_flops)
        ends = [each.attention for each in (left, right) if each is not None]
        self._parallel = any(attention.parallel for attention in ends)

    def __call__(
        self, rows: torch.Tensor, attended: torch.Tensor | None, rotations: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = [rows, *(each for each in (attended, rotations) if each is not None)]
        flops = len(rows) * self._row_flops
        behind, ready = self._compute.rows(self._pass, *given, flops=flops, parallel=self._parallel)
        return behind, ready

    def _pass(self, rows: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._left is not None:
            rows, others = self._left.leave(rows, others[0]), others[1:]
        if self._right is not None:
            return rows, self._right.enter(rows, *others)
        return rows, rows if self._final_norm is None else self._final_norm(rows)


class _OfLibrary:
    """A passage by the native library."""

    def __init__(self, passages: native.Passages, passage: native.Passage) -> None:
        self._passages, self.passage = passages, passage

    def __call__(
        self, rows: torch.Tensor, attended: torch.Tensor | None, rotations: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._passages.run(self.passage, rows, attended, rotations)


def _native(
    passages: native.Passages,
    left: Step | None,
    right: Step | None,
    final_norm: NormRows | None,
    width: int,
    dtype: torch.dtype,
) -> _OfLibrary | None:
    """The library's passage, if it has one for such widths and products."""
    if width % WIDTH:
        return None
    output = forward = behind = following = None
    turnings: tuple[native.Turning | None, native.Turning | None] = (None, None)
    before = _norm(final_norm)
    if left is not None:
        behind = _norm_behind(left.residual)
        if left.attention.output is not None:
            output = _weight(left.attention.output.product)
            if output is None or (output.inputs, output.outputs) != (left.attention.value_width, width):
                return None
        elif left.attention.value_width != width:
            return None
        if left.feed_forward is not None:
            forward = _forward(left, width)
            if forward is None:
                return None
    if right is not None:
        before = _norm_before(right.residual)
        projection, turnings = right.attention.entrance(right.crossed)
        following = _weight(projection.product)
        if following is None or following.inputs != width:
            return None
    return _OfLibrary(
        passages,
        native.Passage(
            width=width,
            dtype=dtype,
            output=output,
            behind=behind,
            forward=forward,
            before=before,
            following=following,
            turnings=turnings,
        ),
    )


def _forward(step: Step, width: int) -> native.Forward | None:
    """The feed-forward part of a block, if the library multiplies its weights."""
    forward, residual = step.feed_forward, step.feed_forward_residual
    assert forward is not None
    up, down = _weight(forward.up.product), _weight(forward.down.product)
    if up is None or down is None or (up.inputs, down.outputs) != (width, width):
        return None
    assert up.outputs == (2 if forward.gated else 1) * down.inputs, "hidden units are padded to the same width"
    before, behind = _norm_before(residual), _norm_behind(residual)
    return native.Forward(before, up, forward.activation, forward.gated, down, behind)


def _weight(product: Product) -> PackedWeight | None:
    return product.weight if isinstance(product, NativeProduct) else None


def _norm_before(residual: Residual) -> native.Norm | None:
    return _norm(residual.norm) if residual.pre_norm else None


def _norm_behind(residual: Residual) -> native.Norm | None:
    return None if residual.pre_norm else _norm(residual.norm)


def _norm(norm: NormRows | None) -> native.Norm | None:
    return None if norm is None else native.Norm(norm.kind, norm.weight, norm.bias, norm.epsilon)
