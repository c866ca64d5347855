"""The size of a request, once its lengths and offsets are known: its sequences, and what they cost.

In: a problem, and the payloads with its lengths. Out: an `AttentionExtent`, or an InvalidRequest where they contradict
the problem or the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from attnserve import _dtypes
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.options import check_offset
from attnserve_server.requests.positions import keys_within_reach, pairs_within_reach
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.tensors import check_lengths, check_masks, read_integers
from attnserve_server.requests.work import Extent

CALL_COST = 1_000_000
"""What a kernel call costs however little it computes, in FLOPs: some 30 us of one core."""

NOT_FINITE_COST: Final = 32
"""How many times as long attention takes where the native kernel finds NaN or infinities, so that it is written out in
float64: about that for some hundred tokens on a CPU."""
NOT_FINITE_CALL_COST: Final = 200_000_000
"""What that costs in addition, however small it is: about a millisecond."""

PER_SEQUENCE = ("query_lengths", "kv_lengths", "query_offset")
"""The tensors that give each sequence a value of its own."""


class Span(NamedTuple):
    """Sequences `first` to `first + sequences` (exclusive) of a request, which share these lengths and this offset.

    If packed, `sequences` is 1 and the sequence's queries and keys begin at `query_start` and `kv_start`; otherwise
    those are 0. Keys from `kv_length` on do not exist for these sequences.
    """

    first: int
    sequences: int
    query_start: int
    query_length: int
    kv_start: int
    kv_length: int
    offset: int


@dataclass(frozen=True, slots=True)
class AttentionExtent(Extent):
    """The size of a request once its lengths are known. `longest` is the Lq and S of a reply's scores.

    `cost` decides whether a batch is computed on the event loop or on another thread. Unlike `effort`, it leaves out
    the reading of keys and values: the kernel's own threads share that, whichever thread calls it. `whole_effort` is
    the effort if all queries have to be computed with all keys, wherever they stand.
    """

    spans: tuple[Span, ...]
    longest: tuple[int, int]
    effort: int
    whole_effort: int
    scratch_bytes: int


def extent_of(problem: Problem, payloads: Sequence[memoryview], limits: RequestLimits) -> AttentionExtent:
    """The size of a problem with the lengths and offsets in its payloads. Raises InvalidRequest."""
    query_lengths = read_integers(problem.tensors.get("query_lengths"), payloads)
    kv_lengths = read_integers(problem.tensors.get("kv_lengths"), payloads)
    offsets = read_integers(problem.tensors.get("query_offset"), payloads)
    _check_lengths(problem, query_lengths, kv_lengths)
    longest = problem.query_length, problem.kv_length
    sequences = problem.batch
    if problem.packed:
        sequences = 1
        longest = max(query_lengths or (0,)), max(kv_lengths or (0,))
        check_masks(problem.tensors, (problem.batch, problem.query_heads, *longest))
    spans = _spans(problem, query_lengths, kv_lengths, offsets)
    if problem.query_length and not problem.packed:
        limits.check_sequences("query.shape", problem.batch)
    whole = pairs = sum(span.sequences * span.query_length * span.kv_length for span in spans)
    rows, sent = problem.query_length * sequences, problem.kv_length * sequences
    whole_flops = flops = problem.flops(whole, rows, sent)
    # With all keys, since something may not be finite: then queries are computed with the keys out of their reach, too.
    limits.check_flops(problem.weighed(whole_flops, whole))
    kv_tokens = sum(span.sequences * span.kv_length for span in spans)
    whole_effort = effort = problem.effort(whole_flops, whole, rows, kv_tokens, problem.batch)
    if problem.has_band and not problem.written_out:
        pairs = sum(span.sequences * pairs_within_reach(*_band(problem, span)) for span in spans)
        kv_tokens = sum(span.sequences * keys_within_reach(*_band(problem, span)) for span in spans)
        flops = problem.flops(pairs, rows, sent)
        effort = problem.effort(flops, pairs, rows, kv_tokens, problem.batch)
    if problem.written_out:
        calls = sum(span.sequences for span in spans if span.query_length)
    else:
        calls = 0 if problem.stackable and len(spans) == 1 else len(spans)
    return AttentionExtent(
        spans=spans,
        longest=longest,
        query_tokens=rows,
        flops=flops,
        effort=max(effort, kv_tokens * problem.token_bytes if rows else 0),
        whole_effort=whole_effort,
        cost=problem.weighed(effort, pairs) + calls * CALL_COST,
        reply_bytes=reply_bytes(problem, rows, longest[1]),
        scratch_bytes=problem.scratch_bytes(longest[1]),
    )


def not_finite_cost(whole_effort: int, missing: int, sequences: int) -> int:
    """The cost, in FLOPs, of writing out `missing` of the sequences of a request of that effort, which is done for all
    keys.
    """
    return NOT_FINITE_CALL_COST + round(missing / sequences * NOT_FINITE_COST * whole_effort)


def reply_bytes(problem: Problem, rows: int, longest_kv: int) -> int:
    """The bytes of the reply's tensors, for `rows` rows of queries."""
    itemsize = _dtypes.NUMPY[problem.dtype].itemsize
    width = problem.value_dim * itemsize
    if problem.return_lse:
        width += max(4, itemsize)
    if problem.return_scores is not None:
        width += longest_kv * itemsize
    return rows * problem.query_heads * width


def _band(problem: Problem, span: Span) -> tuple[int, int, int, int, int]:
    """What a sequence's queries reach, as `positions` has it."""
    return span.query_length, span.kv_length, span.offset, *problem.window


def _check_lengths(problem: Problem, query_lengths: tuple[int, ...] | None, kv_lengths: tuple[int, ...] | None) -> None:
    for name, lengths, total in (
        ("query_lengths", query_lengths, problem.query_length),
        ("kv_lengths", kv_lengths, problem.kv_length),
    ):
        if lengths is not None:
            check_lengths(name, lengths, total, problem.packed)


def _spans(
    problem: Problem,
    query_lengths: tuple[int, ...] | None,
    kv_lengths: tuple[int, ...] | None,
    offsets: tuple[int, ...] | None,
) -> tuple[Span, ...]:
    """The sequences of a request: neighbours of equal lengths and offsets are one span, unless they are packed."""
    if kv_lengths is None and (offsets is None or len(offsets) == 1):
        offset = _offset(problem, offsets, 0, problem.query_length, problem.kv_length)
        return (Span(0, problem.batch, 0, problem.query_length, 0, problem.kv_length, offset),)
    spans: list[Span] = []
    query_start = kv_start = 0
    for index in range(problem.batch):
        query_length = problem.query_length if query_lengths is None else query_lengths[index]
        kv_length = problem.kv_length if kv_lengths is None else kv_lengths[index]
        offset = _offset(problem, offsets, index, query_length, kv_length)
        span = Span(index, 1, query_start, query_length, kv_start, kv_length, offset)
        if problem.packed:
            query_start += query_length
            kv_start += kv_length
        elif spans and spans[-1][2:] == span[2:]:
            spans[-1] = spans[-1]._replace(sequences=spans[-1].sequences + 1)
            continue
        spans.append(span)
    return tuple(spans)


def _offset(problem: Problem, offsets: tuple[int, ...] | None, index: int, query_length: int, kv_length: int) -> int:
    """The position of a sequence's first query; 0 if positions make no difference."""
    offset = kv_length - query_length if problem.bottom_right else 0
    if offsets:
        offset = offsets[index if len(offsets) > 1 else 0]
        check_offset(index, offset)
    return offset if problem.needs_positions else 0
