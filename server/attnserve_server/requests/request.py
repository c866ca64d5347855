"""One attention request: a problem, the contents of its tensors, and the sequences in them.

Whatever depends on contents is checked here: lengths, their sums, and offsets. Payloads stay where they were received.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from attnserve import _dtypes, _fields
from attnserve._wire import Payloads
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.options import check_offset
from attnserve_server.requests.problem import Problem, problem_of
from attnserve_server.requests.reply import encode_attend_response
from attnserve_server.requests.tensors import check_broadcast, read_integers
from attnserve_server.requests.work import BatchResult, Independent, Phases, RequestResult

if TYPE_CHECKING:
    from attnserve_server.devices import Device

CALL_COST = 1_000_000
"""What a kernel call costs however little it computes, in FLOPs: some 30 us of one core."""

KERNELS, WRITTEN_OUT, NOT_FINITE = "attend, by kernels", "attend, written out", "attend, not finite"
"""The groups of requests."""

NOT_FINITE_COST: Final = 32
"""How many times as long attention takes where the native kernel finds NaN or infinities, so that it is written out in
float64: about that for some hundred tokens on a CPU."""
NOT_FINITE_CALL_COST: Final = 200_000_000
"""What that costs in addition, however small it is: about a millisecond."""

PER_SEQUENCE = ("query_lengths", "kv_lengths", "query_offset")
"""The tensors that give each sequence a value of its own."""

MAX_KNOWN_HEADER = 1024
"""A longer header (with unknown fields) is not remembered: callers could fill the memory with such."""


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
class Extent:
    """The size of a request once its lengths are known. `longest` is the Lq and S of a reply's scores."""

    spans: tuple[Span, ...]
    longest: tuple[int, int]
    query_tokens: int
    flops: int
    effort: int
    cost: int
    reply_bytes: int
    scratch_bytes: int


class Unfinished(NamedTuple):
    """A result that lacks some sequences, given by their places in ascending order: they contain NaN or infinities,
    whose visible effects are computed written out in float64.
    """

    sequences: Sequence[int]
    result: RequestResult


@dataclass(slots=True)
class Request(Independent):
    """A problem with its payloads and its size."""

    reply_field: ClassVar[int] = pb.AttendStreamReply.ATTEND_FIELD_NUMBER

    problem: Problem
    payloads: Payloads
    extent: Extent
    received_bytes: int
    unfinished: Unfinished | None = None
    """Its result so far, if it is to run once more."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The sequences."""
        return self.extent.spans

    @property
    def longest(self) -> tuple[int, int]:
        """The Lq and S of a reply's scores."""
        return self.extent.longest

    @property
    def query_tokens(self) -> int:
        """Rows of queries, over all sequences."""
        return self.extent.query_tokens

    @property
    def flops(self) -> int:
        """The floating-point operations that it asks for."""
        return self.extent.flops

    @property
    def effort(self) -> int:
        """What computing takes, in FLOPs, with a kernel that none of its options slows down: see `Problem.effort`. At
        least the bytes of keys and values that it reads: a core reads 12 to 80 GB/s, depending on how far the data is,
        and computes about 50 GFLOP/s. It decides how many threads are worth waking.
        """
        return self.extent.effort

    @property
    def cost(self) -> int:
        """What it costs to compute, in FLOPs of plain attention: its own, weighted by how slow its kernel is, and those
        of its kernel calls. Reading is left out: it makes handing a decoder step over from the event loop no more
        worthwhile, since other threads help there.
        """
        if self.unfinished is not None:
            return not_finite_cost(self.extent.effort, len(self.unfinished.sequences), self.problem.batch)
        return self.extent.cost

    @property
    def layer(self) -> None:
        """No layer."""

    @property
    def group(self) -> Hashable:
        """Equal for requests that one batch can hold: any, whatever they ask for, since devices find what can share a
        kernel call; but written-out requests do not hold up others.
        """
        if self.unfinished is not None:
            return NOT_FINITE
        return WRITTEN_OUT if self.problem.one_by_one else KERNELS

    @property
    def kind(self) -> str:
        """The dtype and the way of computing: requests of one kind are about equally fast."""
        if self.unfinished is not None:
            return f"attend {_dtypes.name(self.problem.dtype)}, not finite"
        return self.problem.kind

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.problem.priority

    @property
    def reply_bytes(self) -> int:
        """The bytes of the reply's tensors."""
        return self.extent.reply_bytes

    @property
    def scratch_bytes(self) -> int:
        """The memory for the projections of an additive score."""
        return self.extent.scratch_bytes

    def run_batch(self, device: Device, batch: Sequence[Request]) -> BatchResult:
        """Computes a batch of attentions."""
        return device.run(batch)

    def encode(self, result: RequestResult, phases: Phases, batch_size: int) -> tuple[list[_fields.Buffer], int]:
        """The pieces of the encoded reply, and their total length."""
        return encode_attend_response(self, result, phases, batch_size)

    def but_for(self, sequences: Sequence[int], result: RequestResult | None) -> Request:
        """The request as it is to run once more, with a result that lacks some sequences."""
        assert result is not None
        return replace(self, unfinished=Unfinished(sequences, result))

    def of_sequences(self, places: Sequence[int]) -> Request:
        """The request reduced to some of its sequences, given by their places in ascending order."""
        some: list[Span] = []
        last = -1
        remaining = iter(self.spans)
        span = next(remaining)
        for place in places:
            while place >= span.first + span.sequences:
                span, last = next(remaining), -1
            if place == last + 1 > 0:
                some[-1] = some[-1]._replace(sequences=some[-1].sequences + 1)
            else:
                some.append(span._replace(first=place, sequences=1))
            last = place
        flops = self.flops * len(places) // self.problem.batch
        return replace(self, extent=replace(self.extent, spans=tuple(some), flops=flops))

    def payload(self, name: str) -> memoryview:
        """The elements of a tensor that the problem has."""
        index = self.problem.tensors[name].payload
        return self.payloads[index] if index >= 0 else memoryview(b"")


def request_of(header: bytes, payloads: Payloads, size: int, limits: RequestLimits) -> Request:
    """The request that a header and its payloads state; `size` is its bytes. Raises InvalidRequest."""
    problem, extent = _known(header, limits) if len(header) <= MAX_KNOWN_HEADER else _follows(header, limits)
    if extent is None:
        extent = _extent(problem, payloads, limits)
    return Request(problem, payloads, extent, size)


def _follows(header: bytes, limits: RequestLimits) -> tuple[Problem, Extent | None]:
    """What follows from a header alone: the extent, too, if no lengths or offsets are given."""
    problem = problem_of(header)
    limits.check_tensors(problem.tensors)
    for name in PER_SEQUENCE:
        if name in problem.tensors:
            limits.check_sequences(f"{name}.shape", problem.batch)
            return problem, None
    return problem, _extent(problem, (), limits)


_known = lru_cache(maxsize=4096)(_follows)


def _extent(problem: Problem, payloads: Sequence[memoryview], limits: RequestLimits) -> Extent:
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
        for name in ("mask", "bias"):
            if name in problem.tensors:
                check_broadcast(name, problem.tensors[name], (problem.batch, problem.query_heads, *longest))
    spans = _spans(problem, query_lengths, kv_lengths, offsets)
    pairs = sum(span.sequences * span.query_length * span.kv_length for span in spans)
    rows = problem.query_length * sequences
    flops = problem.flops(pairs, rows, problem.kv_length * sequences)
    limits.check_flops(flops * problem.weight)
    kv_tokens = sum(span.sequences * span.kv_length for span in spans)
    effort = problem.effort(flops, rows, kv_tokens, problem.batch)
    if problem.one_by_one:
        calls = sum(span.sequences for span in spans if span.query_length)
    else:
        calls = 0 if problem.stackable and len(spans) == 1 else len(spans)
    return Extent(
        spans=spans,
        longest=longest,
        query_tokens=rows,
        flops=flops,
        effort=max(effort, kv_tokens * problem.token_bytes if rows else 0),
        cost=effort * problem.weight + calls * CALL_COST,
        reply_bytes=reply_bytes(problem, rows, longest[1]),
        scratch_bytes=problem.scratch_bytes(longest[1]),
    )


def not_finite_cost(effort: int, missing: int, sequences: int) -> int:
    """The cost, in FLOPs, of writing out `missing` of the sequences of a request of that effort."""
    return NOT_FINITE_CALL_COST + round(missing / sequences * NOT_FINITE_COST * effort)


def reply_bytes(problem: Problem, rows: int, longest_kv: int) -> int:
    """The bytes of the reply's tensors, for `rows` rows of queries."""
    itemsize = _dtypes.NUMPY[problem.dtype].itemsize
    width = problem.value_dim * itemsize
    if problem.return_lse:
        width += max(4, itemsize)
    if problem.return_scores is not None:
        width += longest_kv * itemsize
    return rows * problem.query_heads * width


def _check_lengths(problem: Problem, query_lengths: tuple[int, ...] | None, kv_lengths: tuple[int, ...] | None) -> None:
    for name, lengths, total in (
        ("query_lengths", query_lengths, problem.query_length),
        ("kv_lengths", kv_lengths, problem.kv_length),
    ):
        if lengths is None:
            continue
        for index, length in enumerate(lengths):
            if not 0 <= length <= total:
                raise InvalidRequest(f"{name}[{index}]", f"from 0 to {total}", length)
        if problem.packed and sum(lengths) != total:
            raise InvalidRequest(name, f"a sum of {total}, the total of the packed tensor", sum(lengths))


def _spans(
    problem: Problem,
    query_lengths: tuple[int, ...] | None,
    kv_lengths: tuple[int, ...] | None,
    offsets: tuple[int, ...] | None,
) -> tuple[Span, ...]:
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
