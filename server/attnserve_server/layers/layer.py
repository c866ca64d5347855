"""A layer on a device: what goes in for each request of a batch, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from attnserve_server.layers.application import Application
from attnserve_server.layers.direct import Plan
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.specification import LayerSpecification

if TYPE_CHECKING:
    from attnserve_server.layers.rows import Packing


@dataclass(slots=True, kw_only=True)
class LayerInput:
    """One request: N sequences, packed end to end, `lengths` of them summing to `total`; Hq query heads.

    input [total, inputs] in the layer's dtype, or token ids, int64 [total]. context [total_s, contexts] likewise, with
    `context_lengths`; both None: the input itself. `offsets`, one per sequence, are the positions of first inputs, for
    masks and embeddings. None means 0 for embeddings, and for masks what `options.bottom_right` says. mask (bool) and
    bias (of the accumulation dtype) have rank 4 and broadcast to [N, Hq, longest length, longest context length].
    segments, int64 [total]; None means 0.
    """

    input: torch.Tensor
    lengths: list[int]
    context: torch.Tensor | None = None
    context_lengths: list[int] | None = None
    offsets: list[int] | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    options: LayerOptions = field(default_factory=LayerOptions)


@dataclass(slots=True)
class LayerOutput:
    """One reply: output [total, outputs] and scores [Hq, total, longest context] (without Hq if averaged) in the
    layer's dtype; lse [Hq, total] in the accumulation dtype. Beyond a sequence's own keys, scores are -inf, weights 0.
    `packings` are the rows in which it was computed, with those of other requests.
    """

    output: torch.Tensor
    lse: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    packings: Sequence[Packing] = ()


class Layer(Protocol):
    """A layer with its weights on a device."""

    specification: LayerSpecification

    def plan(self, application: Application, lengths: Sequence[int]) -> Plan | None:
        """How to compute requests whose sequences have these lengths where they were received; None if `run` computes
        them.
        """

    def run(self, inputs: Sequence[LayerInput]) -> list[LayerOutput]:
        """Computes checked requests together: a reply's bits do not depend on the other requests."""
