"""A request's header, checked and in canonical form. Serialised header in, `Problem` out.

Everything about a request but the contents of its tensors is in its header, and callers send the same header over and
over: `request` caches the results for recent ones, so that a request costs a look-up. What depends on contents (lengths
and offsets) is checked there.

Notation as in the proto comments: B sequences, Hq query heads, Hk key/value heads, Lq queries, S keys, widths D, Dk,
Dv.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from attnserve import _dtypes
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest, Malformed
from attnserve_server.requests.axes import Axes, KeyShape, axes_of, batch_of_packed, check_ranks, nothing_appended
from attnserve_server.requests.options import (
    ScoreStage,
    causal_window,
    is_bottom_right,
    priority_of,
    score_stage_of,
    window_of,
)
from attnserve_server.requests.tensors import (
    TensorSpec,
    check_masks,
    float_tensor,
    int_tensor,
    masks_of,
    parameter,
    shown,
)

WRITTEN_OUT = 8
"""How many times as long an operation takes in written-out attention (for softcaps, returned scores, learned scores,
and ALiBi beside a mask or a bias) as in the kernels for plain attention: 3 to 9, measured on a CPU. The native kernel
is not slowed down by softcaps, but it is not known here whether there is one."""
ADDITIVE = 80
"""How many times as long an operation takes with additive scores, where it is mostly a tanh."""

ROW_COST, KEY_COST, HEAD_COST = 2_000, 100, 10_000
"""The least cost in FLOPs of a query of a head, a key of a head, and a head of keys, however narrow they are and
however few they meet: measured with the native kernel, with heads of one element.
"""
PAIR_COST, WRITTEN_OUT_PAIR_COST = 64, 1_024
"""The least cost of a query and a key that meet, with the native kernel and where attention is written out: 2 ns and 30
ns of one core.
"""

QUERIES_OF_A_KEY = "1 query", "2 to 7 queries", "8 to 31 queries", "32 queries or more"
"""How many queries share the reading of a key, on average, as far as kinds of work tell them apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What to compute, except the contents of the tensors. Compared by identity: it is the key of what is remembered
    for it, and equal headers share one.

    `window` is (left, right), -1 being no bound; a causal mask is a window whose right is 0. `query_length` and
    `kv_length` are the totals if `packed`. `tensors` has an entry for each tensor that is given: query, key, value,
    mask, bias, alibi_slopes, sinks, query_lengths, kv_lengths, query_offset, and the parameters of the score by their
    paths. `group` is equal for problems that differ only in lengths and layouts: ragged kernels compute those together.
    `written_out` problems are not for torch's kernels of plain attention: they cost as much as with the kernel that can
    do everything. `kind` is that of `Work`.
    """

    tensors: Mapping[str, TensorSpec]
    dtype: int
    rank: int
    length_first: bool
    packed: bool
    batch: int
    query_heads: int
    kv_heads: int
    query_length: int
    kv_length: int
    head_dim: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float
    bottom_right: bool
    window: tuple[int, int]
    score: str | None
    return_lse: bool
    return_scores: ScoreStage | None
    priority: int
    written_out: bool
    group: Hashable
    kind: str

    @property
    def tokens_first(self) -> bool:
        """Whether a token's heads lie side by side: never so in rank 2, which has no heads."""
        return self.length_first and self.rank > 2

    @property
    def needs_positions(self) -> bool:
        """Whether positions of queries make any difference."""
        return self.has_band or "alibi_slopes" in self.tensors

    @property
    def has_band(self) -> bool:
        """Whether a query's position excludes keys: causal masks and windows do."""
        return self.window != (-1, -1)

    @property
    def stackable(self) -> bool:
        """Whether requests can share a kernel call: they differ only in queries, keys, values, masks and biases."""
        return not self.packed and self.score is None and not self.tensors.keys() & {"alibi_slopes", "sinks"}

    @property
    def weight(self) -> int:
        """What an operation costs, in operations of plain attention."""
        if self.score == "additive":
            return ADDITIVE
        return WRITTEN_OUT if self.written_out else 1

    def scratch_bytes(self, kv_length: int) -> int:
        """Bytes that an additive score takes besides the scores, in float64: keys projected to hidden units, twice."""
        if self.score != "additive":
            return 0
        return 16 * self.tensors["additive.query_weight"].shape[0] * self.kv_heads * kv_length

    def flops(self, pairs: int, query_tokens: int, kv_tokens: int) -> int:
        """Floating-point operations for that many query-key pairs, counted as multiplications and additions. The pairs
        are those that positions and lengths allow, whatever masks exclude; all of them where attention is written out.
        """
        score_width = self.key_dim
        extra = 0
        if self.score == "general":
            extra = 2 * query_tokens * self.query_heads * self.head_dim * self.key_dim
        elif self.score == "additive":
            units = self.tensors["additive.query_weight"].shape[0]
            score_width = 2 * units  # an addition, a tanh (counted as two) and a multiply-add for each hidden unit
            extra = (
                2 * units * (query_tokens * self.query_heads * self.head_dim + kv_tokens * self.kv_heads * self.key_dim)
            )
        return 2 * pairs * self.query_heads * (score_width + self.value_dim) + extra

    def weighed(self, flops: int, pairs: int) -> int:
        """FLOPs or effort in operations of plain attention; or, if that is more, what so many query-key pairs take at
        least: with narrow heads, each operation takes longer.
        """
        pair_cost = WRITTEN_OUT_PAIR_COST if self.written_out else PAIR_COST
        return max(flops * self.weight, pair_cost * pairs * self.query_heads)

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values, if they are sent."""
        return self.kv_heads * (self.key_dim + self.value_dim) * _dtypes.NUMPY[self.dtype].itemsize

    def effort(self, flops: int, pairs: int, query_tokens: int, kv_tokens: int, sequences: int) -> int:
        """The largest of these: the FLOPs, what so many query-key pairs take, and what reading tokens and writing rows
        takes. A million heads of one element are almost no FLOPs, but take a third of a second.
        """
        if not query_tokens:
            return flops
        of_pairs = 0 if self.written_out else PAIR_COST * self.query_heads * pairs
        of_keys = self.kv_heads * (KEY_COST * kv_tokens + HEAD_COST * sequences)
        return max(flops, of_pairs, ROW_COST * self.query_heads * query_tokens + of_keys)


def problem_of(header: bytes, resident: KeyShape | None = None) -> Problem:
    """The problem that a serialised header states (`AttendRequest`, with tickets for payloads and no caches).

    Raises InvalidRequest with the path of the field that breaks the contract. `resident` as in `check`.
    """
    try:
        message = pb.AttendRequest.FromString(header)
    except DecodeError as error:
        raise Malformed("", error) from None
    return check(message, resident)


def check(message: pb.AttendRequest, resident: KeyShape | None = None) -> Problem:
    """The problem that a message states. Raises InvalidRequest.

    With resident keys, `key` and `value`, if given, are what is appended to those; the problem's `kv_length` is the
    length of what is appended alone, and masks are not checked against it.
    """
    tensors = {"query": float_tensor(message, "query")}
    query = tensors["query"]
    length_first = message.layout in (pb.LAYOUT_LENGTH_FIRST, pb.LAYOUT_PACKED)
    if resident is None or message.HasField("key") or message.HasField("value"):
        key = tensors["key"] = float_tensor(message, "key")
        value = tensors["value"] = float_tensor(message, "value")
    else:
        key, value = nothing_appended(query, resident, length_first)
    check_ranks(message, query, key, value, resident)
    rank, packed = len(query.shape), message.layout == pb.LAYOUT_PACKED
    sequences = batch_of_packed(message) if packed else None
    of_keys = "key" if "key" in tensors else "the caches"
    axes = axes_of(query, key, value, length_first, resident, of_keys)

    score = message.WhichOneof("score")
    if score is None and axes.key_dim != axes.head_dim:
        if resident is not None:
            raise InvalidRequest("query.shape", f"width {axes.key_dim}, as the keys of the caches have", shown(query))
        raise InvalidRequest("key.shape", f"the width {axes.head_dim} of query, as the dot product needs", shown(key))
    tensors |= _score_parameters(message, axes)
    if sequences is not None:
        axes = axes._replace(batch=sequences)
    tensors |= _of_masks(message, axes, packed, resident)

    scale = message.scale if message.HasField("scale") else (axes.head_dim**-0.5 if score is None else 1.0)
    if not math.isfinite(scale):
        raise InvalidRequest("scale", "a finite number", scale)
    if not (math.isfinite(message.softcap) and message.softcap >= 0):
        raise InvalidRequest("softcap", "a finite number from 0", message.softcap)
    bottom_right = is_bottom_right(message)
    return_scores = score_stage_of(message)
    priority = priority_of(message)
    window = causal_window(message.causal, window_of(message))
    hides = "alibi_slopes" in tensors and not tensors.keys().isdisjoint(("mask", "bias"))
    written_out = score is not None or message.softcap > 0 or return_scores is not None or hides
    options = (window, scale, message.softcap, score, message.return_lse, return_scores)
    optional = tuple(name in tensors for name in ("mask", "bias", "alibi_slopes", "sinks"))
    return Problem(
        tensors=tensors,
        dtype=query.dtype,
        rank=rank,
        length_first=length_first,
        packed=packed,
        **axes._asdict(),
        scale=scale,
        softcap=message.softcap,
        bottom_right=bottom_right or (resident is not None and message.alignment == pb.ALIGNMENT_UNSPECIFIED),
        window=window,
        score=score,
        return_lse=message.return_lse,
        return_scores=return_scores,
        priority=priority,
        written_out=written_out,
        group=(
            query.dtype,
            axes.query_heads,
            axes.kv_heads,
            axes.head_dim,
            axes.key_dim,
            axes.value_dim,
            options,
            optional,
        ),
        kind=_kind(query.dtype, score or ("written out" if written_out else "by kernels"), axes, packed),
    )


def _kind(dtype: int, way: str, axes: Axes, packed: bool) -> str:
    """What decides how long an operation takes: the dtype, the way of computing, and how many queries meet a key once
    it has been read. If these are few, reading takes longer than computing.
    """
    sequences = axes.batch if packed else 1
    queries = axes.query_length * axes.query_heads // max(1, axes.kv_heads * sequences)
    of_a_key = QUERIES_OF_A_KEY[min(queries.bit_length() // 2, len(QUERIES_OF_A_KEY) - 1)]
    return f"attend {_dtypes.name(dtype)}, {way}, {of_a_key}"


def _score_parameters(message: pb.AttendRequest, axes: Axes) -> dict[str, TensorSpec]:
    """The tensors of a learned score, if there is one. Raises InvalidRequest."""
    tensors = {}
    if message.HasField("general"):
        tensors["general.weight"] = parameter(message, "general.weight", (axes.head_dim, axes.key_dim))
    elif message.HasField("additive"):
        query_weight = float_tensor(message, "additive.query_weight")
        if len(query_weight.shape) != 2 or query_weight.shape[0] < 1:
            raise InvalidRequest(
                "additive.query_weight.shape", f"[U, {axes.head_dim}], U being 1 or more", shown(query_weight)
            )
        units = query_weight.shape[0]
        tensors["additive.query_weight"] = parameter(message, "additive.query_weight", (units, axes.head_dim))
        tensors["additive.key_weight"] = parameter(message, "additive.key_weight", (units, axes.key_dim))
        for name in ("bias", "output_weight"):
            if message.additive.HasField(name):
                tensors[f"additive.{name}"] = parameter(message, f"additive.{name}", (units,))
    return tensors


def _of_masks(message: pb.AttendRequest, axes: Axes, packed: bool, resident: KeyShape | None) -> dict[str, TensorSpec]:
    """The tensors that say which keys count, and with which weight. Raises InvalidRequest."""
    tensors = {}
    for name in ("alibi_slopes", "sinks"):
        if message.HasField(name):
            tensors[name] = parameter(message, name, (axes.query_heads,))
    for name in ("query_lengths", "kv_lengths"):
        if message.HasField(name):
            tensors[name] = int_tensor(message, name, ((axes.batch,),))
    if message.HasField("query_lengths") and not packed:
        raise InvalidRequest("query_lengths", "no value, for they belong to the packed layout", "a tensor")
    if message.HasField("query_offset"):
        tensors["query_offset"] = int_tensor(message, "query_offset", tuple(dict.fromkeys(((axes.batch,), (1,), ()))))
    tensors |= masks_of(message)
    if not packed and resident is None:
        target = (axes.batch, axes.query_heads, axes.query_length, axes.kv_length)
        check_masks(tensors, target, len(message.query.shape))
    return tensors
