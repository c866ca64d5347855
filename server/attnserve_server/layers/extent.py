"""The extent of an application in a layer, once its lengths are known: checked and counted, without its rows.

In: an application, and the payloads of lengths and offsets. Out: a `LayerExtent`, remembered if it follows from the
header alone; InvalidRequest if options, widths, lengths or offsets do not fit the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from attnserve import _dtypes
from attnserve_server.errors import InvalidRequest
from attnserve_server.layers.application import PER_SEQUENCE, Application
from attnserve_server.layers.checks import check_asked
from attnserve_server.layers.cost import cost_of
from attnserve_server.layers.direct import Plan
from attnserve_server.layers.layer import Layer
from attnserve_server.layers.outline import Outline
from attnserve_server.requests.extent import CALL_COST
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.options import read_offsets
from attnserve_server.requests.tensors import check_lengths, check_masks, read_integers
from attnserve_server.requests.work import Extent

MOST_KEPT: Final = 1024
"""How many applications of a layer are remembered."""
MOST_SEQUENCES: Final = 256
"""Applications with more sequences than this are not remembered: each sequence takes memory."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerExtent(Extent):
    """The lengths and costs of a request. `lengths`, `context_lengths` and `offsets` have one per sequence, the latter
    two None if they are not given; `longest_keys` is the S of the reply's scores, if any.
    """

    lengths: list[int]
    context_lengths: list[int] | None
    offsets: list[int] | None
    longest_keys: int
    weighed: int
    """The FLOPs, in operations of plain attention."""
    plan: Plan | None
    """How to compute the request where it was received; None if it cannot be."""


class Extents:
    """The extents of one layer's applications."""

    def __init__(self, layer: Layer, outline: Outline) -> None:
        self._layer = layer
        self._outline = outline
        self._known: dict[Application, LayerExtent] = {}

    def of(
        self, application: Application, payloads: Sequence[memoryview], limits: RequestLimits, *, remember: bool
    ) -> LayerExtent:
        """The extent of an application; `remember` is for one that will be asked for again. Raises InvalidRequest."""
        extent = self._known.get(application)
        if extent is None:
            extent = self._extent(application, payloads, limits)
            few = len(extent.lengths) <= MOST_SEQUENCES
            if remember and few and application.tensors.keys().isdisjoint(PER_SEQUENCE):
                if len(self._known) >= MOST_KEPT:
                    self._known.clear()
                self._known[application] = extent
        return extent

    def _extent(self, application: Application, payloads: Sequence[memoryview], limits: RequestLimits) -> LayerExtent:
        specification, layer = self._layer.specification, self._outline
        check_asked(specification.architecture, application.options, application.tensors)
        if application.takes_ids != bool(layer.vocabulary):
            found = _dtypes.name(application.tensors["input"].dtype)
            raise InvalidRequest("input.dtype", "int64 token ids" if layer.vocabulary else "a floating dtype", found)
        if not application.takes_ids:
            _check_width("input", application, layer.input_width)
        if application.context_length is not None:
            _check_width("context", application, layer.context_width)
        lengths, context_lengths, offsets = _read_lengths(application, payloads)
        cost = cost_of(
            specification.architecture,
            lengths,
            context_lengths,
            scores=application.options.return_scores is not None,
            hides=not application.tensors.keys().isdisjoint(("mask", "bias")),
        )
        limits.check_flops(cost.weighed)
        of_context = None if specification.kind == "transformer" else context_lengths
        if application.batched:
            longest = application.length
            longest_keys = longest if of_context is None else application.keys
        else:
            longest = max(lengths, default=0)
            longest_keys = longest if of_context is None else max(of_context, default=0)
        if not application.resident:
            target = (application.batch, layer.num_query_heads, longest, longest_keys)
            check_masks(application.tensors, target, application.mask_axes)
        return LayerExtent(
            lengths=lengths,
            context_lengths=context_lengths,
            offsets=offsets,
            longest_keys=longest_keys,
            query_tokens=sum(lengths),
            flops=cost.flops,
            weighed=cost.weighed,
            cost=cost.weighed + CALL_COST * max(1, layer.blocks) * len(lengths),
            reply_bytes=_reply_bytes(application, layer, longest_keys),
            plan=self._layer.plan(application, lengths),
        )


def _check_width(name: str, application: Application, width: int) -> None:
    shape = application.tensors[name].shape
    if width == 0:
        raise InvalidRequest(name, "none, for the layer takes none", f"shape {list(shape)}")
    if shape[-1] != width:
        raise InvalidRequest(f"{name}.shape", f"rows of width {width}, as the layer has it", f"shape {list(shape)}")


def _read_lengths(
    application: Application, payloads: Sequence[memoryview]
) -> tuple[list[int], list[int] | None, list[int] | None]:
    """Lengths, context lengths and offsets, one per sequence. Raises InvalidRequest if contents make no sense."""
    tensors = application.tensors

    def lengths(name: str, rows: int) -> list[int]:
        given = read_integers(tensors.get(name), payloads)
        if given is None:
            return [rows] * (0 if application.empty else application.batch)
        check_lengths(name, given, rows, application.packed)
        return list(given)

    context = application.context_length
    own = lengths("lengths", application.length)
    context_lengths = None if context is None else lengths("context_lengths", context)
    offsets = read_offsets(tensors.get("query_offset"), payloads, len(own))
    if application.empty:
        return [], None if context is None else [], None
    return own, context_lengths, offsets


def _reply_bytes(application: Application, layer: Outline, longest_keys: int) -> int:
    heads = layer.num_query_heads
    itemsize = 8 if application.takes_ids else _dtypes.NUMPY[application.tensors["input"].dtype].itemsize
    width = layer.output_width * itemsize
    if application.options.return_lse:
        width += 8 * heads
    if application.options.return_scores is not None:
        width += longest_keys * itemsize * (1 if application.options.average_scores else heads)
    return application.rows * width
