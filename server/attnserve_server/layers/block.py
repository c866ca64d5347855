"""A block as a list of steps: each is an attention with its residual and norm, and what follows up to the next.

All functions here are functions of rows: each output row depends only on the same row of the inputs.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.layers.feed_forward import FeedForwardRows
from attnserve_server.layers.multi_head import MultiHead
from attnserve_server.layers.norms import NormRows, build_norm
from attnserve_server.layers.product import products_of
from attnserve_server.layers.specification import Block


@dataclass(frozen=True, slots=True)
class Residual:
    """A part's residual connection, with the norm before the part, x + part(norm(x)), or after, norm(x + part(x))."""

    norm: NormRows
    pre_norm: bool

    def before(self, rows: torch.Tensor) -> torch.Tensor:
        """The input of the part."""
        return self.norm(rows) if self.pre_norm else rows

    def behind(self, rows: torch.Tensor, of_part: torch.Tensor) -> torch.Tensor:
        """The result, from the rows and the part's output for them."""
        rows = rows + of_part
        return rows if self.pre_norm else self.norm(rows)


@dataclass(frozen=True, slots=True)
class Step:
    """One attention: `enter` computes its queries, keys and values, `leave` continues with its outputs.

    `crossed`: the keys come from the context, by the attention's `project_contexts`. Only the last step of a block has
    `feed_forward`.
    """

    attention: MultiHead
    residual: Residual
    crossed: bool
    feed_forward: FeedForwardRows | None
    feed_forward_residual: Residual

    @property
    def enter_flops(self) -> int:
        """The cost of `enter` for one row."""
        return self.attention.query_flops if self.crossed else self.attention.project_flops

    @property
    def leave_flops(self) -> int:
        """The cost of `leave` for one row."""
        return self.attention.finish_flops + (0 if self.feed_forward is None else self.feed_forward.row_flops)

    def enter(self, rows: torch.Tensor, *rotations: torch.Tensor) -> torch.Tensor:
        """Rows [n, width] to their projections for the attention."""
        project = self.attention.project_queries if self.crossed else self.attention.project
        return project(self.residual.before(rows), *rotations)

    def leave(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Rows [n, width] from before the attention, and its outputs, to rows [n, width]."""
        rows = self.residual.behind(rows, self.attention.finish(attended))
        if self.feed_forward is None:
            return rows
        residual = self.feed_forward_residual
        return residual.behind(rows, self.feed_forward(residual.before(rows)))


def build_steps(
    block: Block,
    parameters: MutableMapping[str, torch.Tensor],
    prefix: str,
    dtype: torch.dtype,
    compute: Compute,
) -> list[Step]:
    """The steps of the block whose parameters' names begin with `prefix`. Weights are removed from `parameters`;
    `compute` is the device.
    """

    def residual(part: str) -> Residual:
        return Residual(build_norm(block.norm, parameters, f"{prefix}{part}.norm."), block.pre_norm)

    attentions = [("self", block.self_attention)]
    if block.cross_attention is not None:
        attentions.append(("cross", block.cross_attention))
    feed_forward = FeedForwardRows(block.feed_forward, parameters, f"{prefix}feed_forward.", products_of(compute))
    return [
        Step(
            attention=MultiHead(attention, parameters, f"{prefix}{part}.", dtype, compute, own=part == "self"),
            residual=residual(part),
            crossed=part == "cross",
            feed_forward=feed_forward if place == len(attentions) else None,
            feed_forward_residual=residual("feed_forward"),
        )
        for place, (part, attention) in enumerate(attentions, 1)
    ]
