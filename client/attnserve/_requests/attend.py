"""A request for attention: the arguments of `attend` as an encoded `AttendRequest`.

In: arrays, tensors and options, as the caller passed them. Out: `AttendCall`, the message in pieces and the conversion
of its response to an `AttentionResult`. The part of the message that does not depend on the arrays' contents is encoded
once and cached, so that asking again for the same shapes and options is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypedDict

from attnserve._errors import InvalidRequestError
from attnserve._numbers import shown
from attnserve._requests import arguments
from attnserve._requests import arrays as _arrays
from attnserve._requests import call as _call
from attnserve._requests.arguments import ArrayLike, ArrayOf, ArrayT, Causal, KindT, Scores
from attnserve._requests.arrays import Array
from attnserve._requests.call import EncodedCall
from attnserve._requests.operation import ATTEND
from attnserve._requests.reply import Response
from attnserve._requests.result import AttentionResult
from attnserve._settings.config import Timeout, checked_timeout
from attnserve.v1 import attention_pb2 as pb

Layout: TypeAlias = Literal["heads_first", "length_first", "packed"]

_LAYOUTS: Final[dict[Any, pb.Layout]] = {
    "heads_first": pb.LAYOUT_HEADS_FIRST,
    "length_first": pb.LAYOUT_LENGTH_FIRST,
    "packed": pb.LAYOUT_PACKED,
}


@dataclass(frozen=True, slots=True, eq=False)
class GeneralScore:
    """The general score of Luong, Pham and Manning (2015), equation 8, for the `score` of `Client.attend`::

        score(q, k) = scale * q W k

    `scale` is an argument of `attend`, by default 1. All heads share W; D is the width of queries, Dk that of keys,
    which may differ.

    - `weight`: W, ``[D, Dk]``, floating.
    """

    weight: ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveScore:
    """The additive score of Bahdanau, Cho and Bengio (2015), for the `score` of `Client.attend`::

        score(q, k) = scale * w tanh(Wq q + Wk k + b)

    `scale` is an argument of `attend`, by default 1. All heads share the parameters; U is the number of hidden units, D
    the width of queries, Dk that of keys, which may differ.

    - `query_weight`: Wq, ``[U, D]``, floating.
    - `key_weight`: Wk, ``[U, Dk]``, floating.
    - `bias`: b, ``[U]``, floating. Default 0.
    - `output_weight`: w, ``[U]``, floating. Default 1: the hidden units are summed.
    """

    query_weight: ArrayLike
    key_weight: ArrayLike
    bias: ArrayLike | None = None
    output_weight: ArrayLike | None = None


class AttendOptions(TypedDict, total=False):
    """The keyword arguments of `attend` and `submit` but those for caches; `Client.attend` says what they mean."""

    causal: Causal | None
    query_offset: ArrayLike | None
    window: tuple[int, int] | None
    mask: ArrayLike | None
    bias: ArrayLike | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    kv_lengths: ArrayLike | None
    query_lengths: ArrayLike | None
    scale: float | None
    softcap: float | None
    score: Literal["dot"] | GeneralScore | AdditiveScore
    layout: Layout
    return_lse: bool
    return_scores: Scores | None
    priority: int
    timeout: Timeout


class AttendCall(EncodedCall[AttentionResult[ArrayT]], Generic[ArrayT]):
    """An encoded `AttendRequest`."""

    __slots__ = ()

    operation = ATTEND

    def result(self, response: Response) -> AttentionResult[ArrayT]:
        """The result of the call. ProtocolError if the response does not fit this call."""
        return AttentionResult(*self.parts(response))


def encode_attend(
    query: ArrayOf[KindT],
    key: ArrayLike | None,
    value: ArrayLike | None,
    resident: bool = False,
    *,
    causal: Causal | None = False,
    query_offset: ArrayLike | None = None,
    window: tuple[int, int] | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    query_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score: Literal["dot"] | GeneralScore | AdditiveScore = "dot",
    layout: Layout = "heads_first",
    return_lse: bool = False,
    return_scores: Scores | None = None,
    priority: int = 0,
    timeout: Timeout = ...,
    default_timeout: float | None = None,
) -> AttendCall[KindT]:
    """The call that `Client.attend` describes; `resident` if there are caches: key and value may then be None.

    InvalidRequestError names an argument that no server would accept.
    """
    timeout = checked_timeout(timeout, default_timeout)
    return_lse = arguments.flag("return_lse", return_lse)
    arrays = [("query", _arrays.floating("query", query))]
    if not (resident and key is None and value is None):
        arrays += (("key", _arrays.floating("key", key)), ("value", _arrays.floating("value", value)))
    if mask is not None:
        arrays.append(("mask", _arrays.boolean("mask", mask)))
    for field, floats in (("bias", bias), ("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if floats is not None:
            arrays.append((field, _arrays.floating(field, floats)))
    for field, lengths in (("query_lengths", query_lengths), ("kv_lengths", kv_lengths)):
        if lengths is not None:
            arrays.append((field, arguments.lengths(field, lengths)))
    if query_offset is not None:
        arrays.append(("query_offset", _arrays.integers("query_offset", query_offset)))
    if not (isinstance(score, str) and score == "dot"):
        arrays += _score_arrays(score)

    causal_mask, alignment = arguments.choice(
        "causal", arguments.RESIDENT_ALIGNMENTS if resident else arguments.ALIGNMENTS, causal
    )
    header = _call.header(
        pb.AttendRequest,
        _call.tensors(arrays),
        causal=causal_mask,
        alignment=alignment,
        layout=arguments.choice("layout", _LAYOUTS, layout),
        window=arguments.window(window),
        scale=None if scale is None else arguments.number("scale", scale),
        softcap=None if softcap is None else arguments.number("softcap", softcap),
        return_lse=return_lse,
        return_scores=arguments.choice("return_scores", arguments.STAGES, return_scores),
        priority=arguments.integer("priority", priority, 32),
    )
    call: AttendCall[KindT] = AttendCall(
        header,
        arrays,
        query,
        returns_lse=return_lse,
        returns_scores=return_scores is not None,
        priority=priority,
        timeout=timeout,
    )
    if resident and key is not None:
        shape = arrays[1][1].shape
        axis = -3 if layout == "length_first" and len(shape) > 2 else -2
        call.appends = shape[axis:][:1]
    return call


def _score_arrays(score: Any) -> list[tuple[str, Array]]:
    """The parameters of a score, by the paths of their fields in the request."""
    if isinstance(score, GeneralScore):
        parameters, optional = {"general.weight": score.weight}, {}
    elif isinstance(score, AdditiveScore):
        parameters = {"additive.query_weight": score.query_weight, "additive.key_weight": score.key_weight}
        optional = {"additive.bias": score.bias, "additive.output_weight": score.output_weight}
    else:
        raise InvalidRequestError(
            f"score: expected 'dot', a GeneralScore or an AdditiveScore, found {shown(score)}", field="score"
        )
    parameters |= {path: array for path, array in optional.items() if array is not None}
    return [(path, _arrays.floating(path, array)) for path, array in parameters.items()]
