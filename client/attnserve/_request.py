"""One attention to ask for: the arguments of `attend` as an encoded `AttendRequest`.

In: arrays, tensors and options, as the caller has them. Out: `AttendCall`, the pieces of the message (views of the
caller's memory among them) and what is needed to read the reply. The part of the message that does not depend on the
arrays' contents is encoded once and remembered, so that asking again for the same shapes and options is cheap.

Checked here is only what needs no knowledge of attention: kinds and dtypes. The server is the authority on the rest.
"""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import EllipsisType
from typing import Any, Final, Generic, Literal, TypeAlias, TypedDict, TypeVar

from attnserve import _arrays, _dtypes, _wire
from attnserve._arrays import Array
from attnserve._config import checked_timeout
from attnserve._errors import InvalidRequestError
from attnserve.v1 import attention_pb2 as pb

ArrayT = TypeVar("ArrayT")
"""The caller's kind of array: what `query` is, so is the result. NumPy arrays or torch tensors."""

ArrayLike: TypeAlias = Any
"""A NumPy array, a torch tensor, or numbers in lists."""

Causal: TypeAlias = bool | Literal["top_left", "bottom_right"]
Layout: TypeAlias = Literal["heads_first", "length_first", "packed"]
Scores: TypeAlias = Literal["raw", "capped", "masked", "weights"]

_ALIGNMENTS: Final[dict[Any, tuple[bool, pb.Alignment]]] = {
    False: (False, pb.ALIGNMENT_UNSPECIFIED),
    True: (True, pb.ALIGNMENT_TOP_LEFT),
    "top_left": (True, pb.ALIGNMENT_TOP_LEFT),
    "bottom_right": (True, pb.ALIGNMENT_BOTTOM_RIGHT),
}
_LAYOUTS: Final[dict[Any, pb.Layout]] = {
    "heads_first": pb.LAYOUT_HEADS_FIRST,
    "length_first": pb.LAYOUT_LENGTH_FIRST,
    "packed": pb.LAYOUT_PACKED,
}
_STAGES: Final[dict[Any, pb.ScoreStage]] = {
    None: pb.SCORE_STAGE_UNSPECIFIED,
    "raw": pb.SCORE_STAGE_RAW,
    "capped": pb.SCORE_STAGE_CAPPED,
    "masked": pb.SCORE_STAGE_MASKED,
    "weights": pb.SCORE_STAGE_WEIGHTS,
}


@dataclass(frozen=True, slots=True, eq=False)
class GeneralScore:
    """The general score `scale * q W k` of Luong, Pham and Manning (2015), equation 8. `scale` defaults to 1."""

    weight: ArrayLike
    """W, ``[D, Dk]``, floating."""


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveScore:
    """The additive score `scale * w tanh(Wq q + Wk k + b)` of Bahdanau, Cho and Bengio (2015), with U hidden units.

    `scale` defaults to 1.
    """

    query_weight: ArrayLike
    """Wq, ``[U, D]``, floating."""
    key_weight: ArrayLike
    """Wk, ``[U, Dk]``, floating."""
    bias: ArrayLike | None = None
    """b, ``[U]``, floating; None for 0."""
    output_weight: ArrayLike | None = None
    """w, ``[U]``, floating; None to sum the hidden units."""


class AttendOptions(TypedDict, total=False):
    """The keyword arguments of `attend` and `submit`; `Client.attend` says what they mean."""

    causal: Causal
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
    timeout: float | None


class AttendCall(Generic[ArrayT]):
    """An encoded request, and what is needed to turn its reply into a result."""

    __slots__ = ("device", "dtype", "pieces", "returns_lse", "returns_scores", "size", "started", "timeout")

    def __init__(
        self,
        pieces: list[_wire.Buffer],
        size: int,
        *,
        dtype: int,
        device: Any,
        returns_lse: bool,
        returns_scores: bool,
        timeout: float | None,
    ) -> None:
        self.started: Final = time.perf_counter()
        """When the call was made, in seconds of `time.perf_counter`."""
        self.pieces: Final = pieces
        """Concatenated, they are the serialised `AttendRequest`."""
        self.size: Final = size
        """The length of the pieces together, in bytes."""
        self.dtype: Final = dtype
        """The dtype of the query, which the output must have."""
        self.device: Final = device
        """The torch device on which the result is wanted; None for NumPy."""
        self.returns_lse: Final = returns_lse
        self.returns_scores: Final = returns_scores
        self.timeout: Final = timeout
        """How long to wait for the reply, in seconds; None for no limit."""


def encode_attend(
    query: ArrayT,
    key: ArrayLike,
    value: ArrayLike,
    *,
    causal: Causal = False,
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
    timeout: float | EllipsisType | None = ...,
    default_timeout: float | None = None,
) -> AttendCall[ArrayT]:
    """The call that `Client.attend` describes. InvalidRequestError names an argument that no server would take."""
    timeout = default_timeout if isinstance(timeout, EllipsisType) else checked_timeout(timeout)
    arrays = [
        ("query", _arrays.floating("query", query)),
        ("key", _arrays.floating("key", key)),
        ("value", _arrays.floating("value", value)),
    ]
    if mask is not None:
        arrays.append(("mask", _arrays.boolean("mask", mask)))
    for field, floats in (("bias", bias), ("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if floats is not None:
            arrays.append((field, _arrays.floating(field, floats)))
    for field, lengths in (("query_lengths", query_lengths), ("kv_lengths", kv_lengths)):
        if lengths is not None:
            array = _arrays.integers(field, lengths)
            arrays.append((field, array if array.shape else array._replace(shape=(1,))))
    if query_offset is not None:
        arrays.append(("query_offset", _arrays.integers("query_offset", query_offset)))
    if not (isinstance(score, str) and score == "dot"):
        arrays += _score_arrays(score)

    header = _header(
        tuple([(field, array.dtype, array.shape) for field, array in arrays]),
        _choice("causal", _ALIGNMENTS, causal),
        _choice("layout", _LAYOUTS, layout),
        None if window is None else _window(window),
        None if scale is None else _number("scale", scale),
        0.0 if softcap is None else _number("softcap", softcap),
        bool(return_lse),
        _choice("return_scores", _STAGES, return_scores),
        priority if priority == 0 else _integer("priority", priority, 32),
    )
    pieces, size = _wire.join(pb.AttendRequest, header, [array.data for _, array in arrays])
    tensor = _arrays.torch_tensor(query)
    return AttendCall(
        pieces,
        size,
        dtype=arrays[0][1].dtype,
        device=None if tensor is None else tensor.device,
        returns_lse=bool(return_lse),
        returns_scores=return_scores is not None,
        timeout=timeout,
    )


@lru_cache(maxsize=1024)
def _header(
    tensors: tuple[tuple[str, int, tuple[int, ...]], ...],
    causal: tuple[bool, pb.Alignment],
    layout: pb.Layout,
    window: tuple[int, int] | None,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    return_scores: pb.ScoreStage,
    priority: int,
) -> bytes:
    """The request with tickets for its tensors, which are given by field, dtype and shape."""
    request = pb.AttendRequest(
        layout=layout,
        causal=causal[0],
        alignment=causal[1],
        softcap=softcap,
        return_lse=return_lse,
        return_scores=return_scores,
        priority=priority,
    )
    if window is not None:
        request.window.SetInParent()
        request.window.left, request.window.right = window
    if scale is not None:
        request.scale = scale
    for index, (field, dtype, shape) in enumerate(tensors):
        tensor = operator.attrgetter(field)(request)
        tensor.dtype = dtype
        tensor.shape.extend(shape)
        tensor.data = _wire.ticket(index, prod(shape) * _dtypes.NUMPY[dtype].itemsize)
    return request.SerializeToString()


def _score_arrays(score: Any) -> list[tuple[str, Array]]:
    """The parameters of a score, by the path of their field in the request."""
    if isinstance(score, GeneralScore):
        parameters = {"general.weight": score.weight}
    elif isinstance(score, AdditiveScore):
        parameters = {
            "additive.query_weight": score.query_weight,
            "additive.key_weight": score.key_weight,
            "additive.bias": score.bias,
            "additive.output_weight": score.output_weight,
        }
    else:
        raise InvalidRequestError(
            f"score: expected 'dot', a GeneralScore or an AdditiveScore, found {score!r}", field="score"
        )
    return [(path, _arrays.floating(path, array)) for path, array in parameters.items() if array is not None]


def _choice(field: str, choices: dict[Any, Any], value: Any) -> Any:
    try:
        return choices[value]
    except (KeyError, TypeError):
        expected = ", ".join(repr(choice) for choice in choices)
        raise InvalidRequestError(f"{field}: expected one of {expected}, found {value!r}", field=field) from None


def _number(field: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"{field}: expected a number, found {value!r}", field=field) from None


def _integer(field: str, value: Any, bits: int) -> int:
    try:
        integer = operator.index(value)
    except TypeError:
        raise InvalidRequestError(f"{field}: expected an integer, found {value!r}", field=field) from None
    if not -(1 << bits - 1) <= integer < 1 << bits - 1:
        raise InvalidRequestError(f"{field}: expected an integer of {bits} bits, found {integer}", field=field)
    return integer


def _window(window: Any) -> tuple[int, int]:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise InvalidRequestError(f"window: expected (left, right), found {window!r}", field="window") from None
    return _integer("window.left", left, 64), _integer("window.right", right, 64)
