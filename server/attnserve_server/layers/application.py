"""A request to apply a layer, as its header states it: checked without the layer or tensor contents, and remembered.

Notation: B sequences of L inputs and S context rows; axes that the rank lacks are 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from google.protobuf.message import DecodeError

from attnserve import _dtypes
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.errors import InvalidRequest, Malformed
from attnserve_server.layers.options import LayerOptions
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.options import is_bottom_right, priority_of, score_stage_of, window_of
from attnserve_server.requests.tensors import (
    TensorSpec,
    check_rank,
    float_tensor,
    int_tensor,
    masks_of,
    shown,
    tensor_at,
)

PER_SEQUENCE: Final = ("lengths", "context_lengths", "query_offset")
"""The tensors with a value for each sequence."""

_GO_ON: Final = "positions go on from what the caches have"


@dataclass(frozen=True, slots=True, eq=False)
class Application:
    """What is asked of which layer. `length` and `context_length` are totals if `packed`, else those of each sequence.
    Compared by identity: identical headers share one object, which is the key to all that is remembered about it.

    `batched` inputs have an axis of sequences, packed ones have lengths instead; a single sequence has neither.
    `context_length` is None without a context. `resident`: each sequence continues what a cache holds.
    """

    layer: str
    tensors: Mapping[str, TensorSpec]
    options: LayerOptions
    priority: int
    takes_ids: bool
    batched: bool
    packed: bool
    batch: int
    length: int
    context_length: int | None
    resident: bool

    @property
    def keys(self) -> int:
        """S of a padded request."""
        return self.length if self.context_length is None else self.context_length

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute, however many sequences without rows a request declares."""
        if self.resident:  # it has no more sequences than it names caches
            return False
        return self.batched and not self.length and not self.context_length

    @property
    def mask_axes(self) -> int:
        """The axes of a mask that has all: a single sequence lacks that of sequences."""
        return 4 if self.batched or self.packed else 3

    @property
    def rows(self) -> int:
        """The rows of the reply."""
        return self.length * (self.batch if self.batched else 1)


def application_of(header: bytes, caches: int, limits: RequestLimits) -> Application:
    """The application to sequences in this many caches, or in none (0), that a serialised header of `ApplyRequest`,
    with tickets and without references to caches, states within limits. Raises InvalidRequest.
    """
    try:
        message = pb.ApplyRequest.FromString(header)
    except DecodeError as error:
        raise Malformed("", error) from None
    application = _application(message, caches)
    limits.check_tensors(application.tensors)
    for name in PER_SEQUENCE:
        if name in application.tensors:
            limits.check_sequences(f"{name}.shape", prod(application.tensors[name].shape))
    if not application.empty:
        limits.check_sequences("input.shape", application.batch)
    return application


def _application(message: pb.ApplyRequest, caches: int) -> Application:
    if not message.layer:
        raise InvalidRequest("layer", "the name of a layer", "nothing")
    tensors = {"input": tensor_at(message, "input")}
    spec = tensors["input"]
    takes_ids = spec.dtype == tensor_pb2.DATA_TYPE_INT64
    if not takes_ids and spec.dtype not in _dtypes.FLOATING:
        raise InvalidRequest("input.dtype", "a floating dtype, or int64 for token ids", _dtypes.name(spec.dtype))
    axes = len(spec.shape) - (0 if takes_ids else 1)
    if axes not in (1, 2):
        activations = "[B, L, d_in], [L, d_in] or packed [total, d_in] (token ids are int64)"
        expected = "[B, L], [L] or packed [total]" if takes_ids else activations
        raise InvalidRequest("input.shape", expected, shown(spec))
    batched = axes == 2
    packed = not batched and message.HasField("lengths")
    batch = spec.shape[0] if batched else 1
    if packed:
        shape = message.lengths.shape
        check_rank("lengths.shape", shape)
        if len(shape) != 1:
            raise InvalidRequest("lengths.shape", "[B]", list(shape))
        batch = shape[0]
    if message.HasField("lengths"):
        tensors["lengths"] = int_tensor(message, "lengths", ((batch,),))
    if caches and caches != batch:
        raise InvalidRequest("caches", f"{batch} caches, one for each sequence", caches)
    if caches and message.alignment == pb.ALIGNMENT_TOP_LEFT:
        raise InvalidRequest("alignment", f"none or bottom right, for {_GO_ON}", "top left")
    context_length = _context(message, tensors, batched, packed, batch)
    if message.HasField("query_offset"):
        if caches:
            raise InvalidRequest("query_offset", f"none, for {_GO_ON}", "a tensor")
        tensors["query_offset"] = int_tensor(message, "query_offset", ((batch,), (1,), ()))
    if message.HasField("segments"):
        if not takes_ids:
            raise InvalidRequest("segments", "none, for only token ids have segments", "a tensor")
        tensors["segments"] = int_tensor(message, "segments", (spec.shape,))
    tensors |= masks_of(message)
    options = LayerOptions(
        causal=message.causal if message.HasField("causal") else None,
        window=window_of(message) if message.HasField("window") else None,
        bottom_right=is_bottom_right(message),
        return_lse=message.return_lse,
        return_scores=score_stage_of(message),
        average_scores=message.average_scores,
    )
    return Application(
        layer=message.layer,
        tensors=tensors,
        options=options,
        priority=priority_of(message),
        takes_ids=takes_ids,
        batched=batched,
        packed=packed,
        batch=batch,
        length=spec.shape[1] if batched else spec.shape[0],
        context_length=context_length,
        resident=caches > 0,
    )


def _context(
    message: pb.ApplyRequest, tensors: dict[str, TensorSpec], batched: bool, packed: bool, batch: int
) -> int | None:
    """The length of the context, which has the layout of the input; None without one."""
    if not message.HasField("context"):
        if message.HasField("context_lengths"):
            raise InvalidRequest("context_lengths", "none without a context", "a tensor")
        return None
    spec = tensors["context"] = float_tensor(message, "context")
    if tensors["input"].dtype not in (spec.dtype, tensor_pb2.DATA_TYPE_INT64):
        found = _dtypes.name(spec.dtype)
        raise InvalidRequest("context.dtype", f"{_dtypes.name(tensors['input'].dtype)} as in input", found)
    if len(spec.shape) != (3 if batched else 2) or (batched and spec.shape[0] != batch):
        expected = f"[{batch}, S, d_context]" if batched else "[S, d_context]"
        raise InvalidRequest("context.shape", f"{expected}, laid out as the input is", shown(spec))
    if message.HasField("context_lengths"):
        tensors["context_lengths"] = int_tensor(message, "context_lengths", ((batch,),))
    elif packed:
        raise InvalidRequest("context_lengths", "the lengths of the packed context", "nothing")
    return spec.shape[1] if batched else spec.shape[0]
