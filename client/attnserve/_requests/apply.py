"""A request to apply a resident layer: the arguments of `apply` as an encoded `ApplyRequest`.

In: a layer's name, arrays, tensors and options, as the caller passed them. Out: `ApplyCall`, the message in pieces and
the conversion of its response to a `LayerResult`. The part of the message that does not depend on the arrays' contents
is encoded once and cached, so that asking again for the same layer, shapes and options is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, TypedDict, cast

import numpy as np

from attnserve._requests import arguments
from attnserve._requests import arrays as _arrays
from attnserve._requests import call as _call
from attnserve._requests.arguments import ArrayLike, ArrayOf, ArrayT, Causal, KindT, Scores
from attnserve._requests.arrays import Array
from attnserve._requests.call import EncodedCall
from attnserve._requests.operation import APPLY
from attnserve._requests.reply import Response
from attnserve._requests.result import LayerResult
from attnserve._settings.config import Timeout, checked_timeout
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

_AS_DEFINED: Final = {None: (None, pb.ALIGNMENT_UNSPECIFIED)}
_ALIGNMENTS: Final = {**arguments.ALIGNMENTS, **_AS_DEFINED}
_RESIDENT_ALIGNMENTS: Final = {**arguments.RESIDENT_ALIGNMENTS, **_AS_DEFINED}


class ApplyOptions(TypedDict, total=False):
    """The keyword arguments of `apply` and `submit_apply` but those for caches; `Client.apply` says what they mean."""

    context: ArrayLike | None
    mask: ArrayLike | None
    bias: ArrayLike | None
    lengths: ArrayLike | None
    context_lengths: ArrayLike | None
    segments: ArrayLike | None
    query_offset: ArrayLike | None
    causal: Causal | None
    window: tuple[int, int] | None
    return_lse: bool
    return_scores: Scores | None
    average_scores: bool
    priority: int
    timeout: Timeout


class ApplyCall(EncodedCall[LayerResult[ArrayT]], Generic[ArrayT]):
    """An encoded `ApplyRequest`."""

    __slots__ = ()

    operation = APPLY

    def result(self, response: Response) -> LayerResult[ArrayT]:
        """The result of the call. ProtocolError if the response does not fit this call."""
        parts = self.parts(response)
        version = cast(pb.ApplyResponse, response.message).layer_version
        return LayerResult(*parts[:-1], version, parts.cache_lengths)


def encode_apply(
    layer: str,
    input: ArrayOf[KindT],
    resident: bool = False,
    *,
    context: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    context_lengths: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    causal: Causal | None = None,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    return_scores: Scores | None = None,
    average_scores: bool = False,
    priority: int = 0,
    timeout: Timeout = ...,
    default_timeout: float | None = None,
) -> ApplyCall[KindT]:
    """The call that `Client.apply` describes; `resident` if there are caches.

    InvalidRequestError names an argument that no server would accept.
    """
    timeout = checked_timeout(timeout, default_timeout)
    return_lse = arguments.flag("return_lse", return_lse)
    arrays = [("input", _arrays.floating_or_ids("input", input))]
    if context is not None:
        arrays.append(("context", _arrays.floating("context", context)))
    if mask is not None:
        arrays.append(("mask", _arrays.boolean("mask", mask)))
    if bias is not None:
        arrays.append(("bias", _arrays.floating("bias", bias)))
    if lengths is not None:
        arrays.append(("lengths", arguments.lengths("lengths", lengths)))
    if context_lengths is not None:
        arrays.append(("context_lengths", arguments.lengths("context_lengths", context_lengths)))
    for field, integers in (("query_offset", query_offset), ("segments", segments)):
        if integers is not None:
            arrays.append((field, _arrays.integers(field, integers)))

    layer = arguments.text("layer", layer)
    causal_mask, alignment = arguments.choice("causal", _RESIDENT_ALIGNMENTS if resident else _ALIGNMENTS, causal)
    header = _call.header(
        pb.ApplyRequest,
        _call.tensors(arrays),
        layer=layer,
        causal=causal_mask,
        alignment=alignment,
        window=arguments.window(window),
        return_lse=return_lse,
        return_scores=arguments.choice("return_scores", arguments.STAGES, return_scores),
        average_scores=arguments.flag("average_scores", average_scores),
        priority=arguments.integer("priority", priority, 32),
    )
    call: ApplyCall[KindT] = ApplyCall(
        header,
        arrays,
        input,
        returns_lse=return_lse,
        returns_scores=return_scores is not None,
        priority=priority,
        timeout=timeout,
    )
    if resident:
        call.appends = _lengths(arrays)
    return call


def _lengths(arrays: Sequence[tuple[str, Array]]) -> Sequence[int]:
    """The lengths of the input's sequences, or the one length of all."""
    for field, array in arrays:
        if field == "lengths":
            return [int(length) for length in np.frombuffer(array.data, np.int64)]
    _, input = arrays[0]
    axis = -1 if input.dtype == tensor_pb2.DATA_TYPE_INT64 else -2
    return input.shape[axis:][:1]
