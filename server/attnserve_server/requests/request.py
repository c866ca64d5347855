"""One attention request: a problem, the contents of its tensors, and the sequences in them.

In: a header and payloads, which stay where they were received. Out: a `Request`, as the engine knows it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from attnserve import _dtypes, _fields
from attnserve._wire import Payloads
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.requests.extent import PER_SEQUENCE, AttentionExtent, Span, extent_of, not_finite_cost
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.problem import Problem, problem_of
from attnserve_server.requests.reply import encode_attend_response
from attnserve_server.requests.work import BatchResult, Finish, Phases, RequestResult, Work

if TYPE_CHECKING:
    from attnserve_server.devices import Device

KERNELS, WRITTEN_OUT, NOT_FINITE = "attend, by kernels", "attend, written out", "attend, not finite"
"""The groups of requests."""

MAX_KNOWN_HEADER = 1024
"""A longer header (with unknown fields) is not remembered: callers could fill the memory with such."""


class Unfinished(NamedTuple):
    """A result that lacks some sequences, given by their places in ascending order: they contain NaN or infinities,
    whose visible effects are computed written out in float64.
    """

    sequences: Sequence[int]
    result: RequestResult


@dataclass(slots=True)
class Request(Work):
    """A problem with its payloads and its size."""

    reply_field: ClassVar[int] = pb.AttendStreamReply.ATTEND_FIELD_NUMBER

    problem: Problem
    payloads: Payloads
    extent: AttentionExtent
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
    def effort(self) -> int:
        """What computing takes, in FLOPs, with a kernel that none of its options slows down: see `Problem.effort`. At
        least the bytes of keys and values that it reads: a core reads 12 to 80 GB/s, depending on how far the data is,
        and computes about 50 GFLOP/s. It decides how many threads are worth waking.
        """
        return self.extent.effort

    @property
    def group(self) -> Hashable:
        """Equal for requests that one batch can hold. These may ask for different things, since devices find what can
        share a kernel call. Written-out requests are apart, so as not to hold up others.
        """
        if self.unfinished is not None:
            return NOT_FINITE
        return WRITTEN_OUT if self.problem.written_out else KERNELS

    @property
    def kind(self) -> str:
        """See `Work.kind`."""
        if self.unfinished is not None:
            return f"attend {_dtypes.name(self.problem.dtype)}, not finite"
        return self.problem.kind

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.problem.priority

    @property
    def scratch_bytes(self) -> int:
        """The memory for the projections of an additive score."""
        return self.extent.scratch_bytes

    def run_batch(self, device: Device, batch: Sequence[Request]) -> BatchResult:
        """Computes a batch of attentions."""
        return device.run(batch)

    def launch_batch(self, device: Device, batch: Sequence[Request]) -> Finish | None:
        """Launches a batch of attentions."""
        return device.launch(batch)

    def encode(self, result: RequestResult, phases: Phases, batch_size: int) -> tuple[list[_fields.Buffer], int]:
        """The pieces of the encoded reply, and their total length."""
        return encode_attend_response(self, result, phases, batch_size)

    def but_for(self, sequences: Sequence[int], result: RequestResult | None) -> Request:
        """The request as it is to run once more, with a result that lacks some sequences."""
        assert result is not None
        cost = not_finite_cost(self.extent.whole_effort, len(sequences), self.problem.batch)
        return replace(self, extent=replace(self.extent, cost=cost), unfinished=Unfinished(sequences, result))

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
        flops = self.extent.flops * len(places) // self.problem.batch
        return replace(self, extent=replace(self.extent, spans=tuple(some), flops=flops))

    def payload(self, name: str) -> memoryview:
        """The elements of a tensor that the problem has."""
        index = self.problem.tensors[name].payload
        return self.payloads[index] if index >= 0 else memoryview(b"")


def request_of(header: bytes, payloads: Payloads, size: int, limits: RequestLimits) -> Request:
    """The request that a header and its payloads state; `size` is its bytes. Raises InvalidRequest."""
    problem, extent = _known(header, limits) if len(header) <= MAX_KNOWN_HEADER else _follows(header, limits)
    if extent is None:
        extent = extent_of(problem, payloads, limits)
    return Request(problem, payloads, extent, size)


def _follows(header: bytes, limits: RequestLimits) -> tuple[Problem, AttentionExtent | None]:
    """What follows from a header alone: the extent, too, if no lengths or offsets are given."""
    problem = problem_of(header)
    limits.check_tensors(problem.tensors)
    for name in PER_SEQUENCE:
        if name in problem.tensors:
            limits.check_sequences(f"{name}.shape", problem.batch)
            return problem, None
    return problem, extent_of(problem, (), limits)


_known = lru_cache(maxsize=4096)(_follows)
