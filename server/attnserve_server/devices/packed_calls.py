"""A pack's tensors: to a ragged kernel, sequences of many requests end to end, tokens first, and back into replies.

In: the pieces of a pack, and the payloads of its requests. Out: what replies carry. All inputs of a call are copied to
one block of host memory and go to the device at once: every operation there takes some microseconds to launch, which is
what small batches wait for.

What does not have the kernel's order has to be rearranged. If it is little, the host does that while it copies, which
costs next to nothing; otherwise the device does. The same holds for what goes into replies, and for looking whether
inputs are finite.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve.v1 import tensor_pb2 as pb
from attnserve_server.devices.packed_results import (
    BITS,
    Bits,
    Found,
    as_bits,
    bytes_of,
    has_kernel_order,
    result_of,
    with_axes,
)
from attnserve_server.devices.packing import Pack, Piece, Window
from attnserve_server.devices.staging import TORCH, sinks_of
from attnserve_server.kernels.bias import add_sinks
from attnserve_server.kernels.ragged import ALIGNMENT, RaggedCall
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import RequestResult

if TYPE_CHECKING:
    from attnserve_server.devices.transfers import Transfers

LOOKED_AT: Final = 256 << 10
"""Whether all inputs of a call of up to this many bytes are finite is found on the host."""
REARRANGED: Final = 512 << 10
"""Tensors of a piece of up to this many bytes are brought into the kernel's order, or out of it, on the host: on the
device, each takes some operations more."""

_EXPONENT: Final[dict[int, int]] = {
    pb.DATA_TYPE_FLOAT32: 0x7F80_0000,
    pb.DATA_TYPE_FLOAT16: 0x7C00,
    pb.DATA_TYPE_BFLOAT16: 0x7F80,
}
"""The bits that are all set in what is not finite."""

Exactly: TypeAlias = Callable[[Request], RequestResult]


class StagedPack:
    """A pack of which the inputs of the first call are on the device, or on their way. Those of further calls follow
    while the one before is computed.
    """

    def __init__(self, pack: Pack, requests: Sequence[Request], transfers: Transfers) -> None:
        self._pack = pack
        self._members = [requests[place] for place in pack.places]
        self._calls = [_Call(pack, window, pieces, self._members, transfers) for window, pieces in pack.calls()]
        if self._calls:
            self._calls[0].stage()

    @property
    def kernel(self) -> str:
        """The name of its kernel."""
        return self._pack.kernel.name

    @property
    def calls(self) -> int:
        """How many calls of the kernel it takes."""
        return len(self._calls)

    def run(self) -> None:
        """Computes it on the current stream, and has the results fetched, without waiting for anything."""
        for call, following in itertools.zip_longest(self._calls, self._calls[1:]):
            call.run()
            if following is not None:
                following.stage()

    def results(self, exactly: Exactly) -> Iterator[tuple[int, RequestResult]]:
        """The places in the batch of its requests and, once they have been fetched, their results. Those of requests
        whose inputs are not all finite have no meaning: these are computed by `exactly`.
        """
        suspects = set().union(*(call.suspects() for call in self._calls))
        found: defaultdict[int, list[Found]] = defaultdict(list)
        for call in self._calls:
            for each in call.found():
                found[each.piece.member].append(each)
        for number, (place, member) in enumerate(zip(self._pack.places, self._members, strict=True)):
            yield place, exactly(member) if number in suspects else result_of(member.problem, found[number])


class _Input(NamedTuple):
    """Queries, keys or values [T, heads, width] of a call."""

    name: str
    tokens: int
    heads: int
    width: int
    item_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """[T, heads, width]."""
        return self.tokens, self.heads, self.width

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.tokens * self.heads * self.width * self.item_bytes

    def length(self, piece: Piece) -> int:
        """The tokens of each sequence of a piece."""
        return piece.query_length if self.name == "query" else piece.kv_length


class _Call:
    """One call of a kernel."""

    def __init__(
        self, pack: Pack, window: Window, pieces: list[Piece], members: Sequence[Request], transfers: Transfers
    ) -> None:
        problem = pack.problem
        self._problem, self._kernel, self._window, self._members = problem, pack.kernel, window, members
        self._transfers = transfers
        # What is rearranged on the device is fetched piece by piece, the rest in one go.
        self._apart = [piece for piece in pieces if self._is_fetched_apart(piece)]
        self._together = [piece for piece in pieces if not self._is_fetched_apart(piece)]
        self._pieces = self._together + self._apart
        queries, keys = sum(piece.queries for piece in pieces), sum(piece.keys for piece in pieces)
        item_bytes = TORCH[problem.dtype].itemsize
        self._inputs = (
            _Input("query", queries, problem.query_heads, problem.head_dim, item_bytes),
            _Input("key", keys, problem.kv_heads, problem.key_dim, item_bytes),
            _Input("value", keys, problem.kv_heads, problem.value_dim, item_bytes),
        )

    def _is_fetched_apart(self, piece: Piece) -> bool:
        problem = self._members[piece.member].problem
        return _is_rearranged(problem, piece.sequences, piece.query_length, problem.query_heads, problem.value_dim)

    def _is_sent_raw(self, each: _Input, piece: Piece) -> bool:
        """Whether a piece is sent as it is, to be rearranged on the device."""
        problem = self._members[piece.member].problem
        return _is_rearranged(problem, piece.sequences, each.length(piece), each.heads, each.width)

    def stage(self) -> None:
        """Copies the inputs, in the kernel's order or raw, and sends them."""
        problem, pieces, inputs = self._problem, self._pieces, self._inputs
        queries = inputs[0].tokens
        # float32 [T, Hq]: to each query the sinks of its request.
        sink_bytes = 4 * queries * problem.query_heads if "sinks" in problem.tensors else 0
        starts = [
            _starts((piece.sequences, piece.query_length) for piece in pieces),
            _starts((piece.sequences, piece.kv_length) for piece in pieces),
        ]
        sizes = [*(each.size for each in inputs), sink_bytes, *(each.nbytes for each in starts)]
        begins = list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        raw = self._transfers.allocate(begins[-1])
        host, bits = raw.numpy(), BITS[inputs[0].item_bytes]
        for each, begin, after in zip(inputs, begins, begins[1:], strict=False):
            stop = begin + each.size
            host[stop:after] = 0  # a gap is looked at, too
            self._fill(each, host[begin:stop].view(bits).reshape(each.shape))
        if sink_bytes:
            host[begins[3] : begins[3] + sink_bytes].view(np.float32).reshape(queries, -1)[...] = self._sinks()
        for begin, places in zip(begins[4:], starts, strict=False):
            host[begin : begin + places.nbytes].view(np.int32)[...] = places
        elements = begins[3]
        self._looked_at = elements <= LOOKED_AT
        self._is_finite = self._looked_at and _is_finite(host[:elements].view(bits), problem.dtype)
        sent = self._transfers.upload(raw)
        self._elements = sent[:elements].view(TORCH[problem.dtype])
        self._sent = [
            self._elements.as_strided(each.shape, (each.heads * each.width, each.width, 1), begin // each.item_bytes)
            for each, begin in zip(inputs, begins, strict=False)
        ]
        self._sent_sinks = None
        if sink_bytes:
            self._sent_sinks = sent[begins[3] : begins[3] + sink_bytes].view(torch.float32).view(queries, -1)
        numbers = sent.view(torch.int32)
        self._starts = [
            numbers.as_strided(places.shape, (1,), begin // 4)
            for begin, places in zip(begins[4:], starts, strict=False)
        ]

    def _fill(self, each: _Input, rows: Bits) -> None:
        """Copies the rows [T, heads, width] of an input."""
        begin = 0
        for piece in self._pieces:
            source = _part(self._members[piece.member], each.name, piece, rows.dtype)
            count = source.shape[0] * source.shape[1]
            if self._is_sent_raw(each, piece):
                source = source.swapaxes(1, 2)
            # Copying large arrays, NumPy lets others have the interpreter: they go on receiving and launching.
            np.copyto(rows[begin : begin + count].reshape(source.shape), source)
            begin += count

    def _sinks(self) -> NDArray[np.float32]:
        """[T, Hq]."""
        members = [self._members[piece.member] for piece in self._pieces]
        each = np.stack([sinks_of(member.problem.tensors, member.payloads) for member in members])
        return np.repeat(each, [piece.queries for piece in self._pieces], axis=0)

    def _in_order(self, each: _Input, sent: torch.Tensor) -> torch.Tensor:
        """An input in the kernel's order, on the device."""
        if not any(self._is_sent_raw(each, piece) for piece in self._pieces):
            return sent
        ordered, begin = torch.empty_like(sent), 0
        for piece in self._pieces:
            length = each.length(piece)
            stop = begin + piece.sequences * length
            rows = sent[begin:stop]
            if self._is_sent_raw(each, piece):
                rows = rows.view(piece.sequences, each.heads, length, each.width).transpose(1, 2)
            ordered[begin:stop].view(rows.shape).copy_(rows)
            begin = stop
        return ordered

    def run(self) -> None:
        """Computes it, and has the results fetched."""
        problem = self._problem
        query, key, value = (self._in_order(*each) for each in zip(self._inputs, self._sent, strict=True))
        (query_starts, kv_starts), sinks = self._starts, self._sent_sinks
        result = self._kernel.attend(
            RaggedCall(
                query,
                key,
                value,
                query_starts,
                kv_starts,
                max(piece.query_length for piece in self._pieces),
                max(piece.kv_length for piece in self._pieces),
                problem.scale,
                self._window,
                problem.return_lse or sinks is not None,
            )
        )
        output, lse = result.output, result.lse
        if sinks is not None:
            assert lse is not None
            output, lse = add_sinks(output, lse, sinks)
        fetch = self._transfers.fetch
        begin = sum(piece.queries for piece in self._together)
        self._fetched = fetch(output[:begin]) if self._apart else fetch(output)
        self._fetched_apart = []
        for piece in self._apart:
            rows = output[begin : begin + piece.queries].view(piece.sequences, piece.query_length, *output.shape[1:])
            self._fetched_apart.append(fetch(rows.transpose(1, 2)))
            begin += piece.queries
        self._lse = fetch(lse.t()) if problem.return_lse and lse is not None else None
        # A sum is finite only if all its terms are; one that is not may just have overflowed.
        self._sum = None if self._looked_at else fetch(self._elements.sum(dtype=torch.float32))
        del self._elements, self._sent, self._sent_sinks, self._starts  # the next call may need the memory

    def suspects(self) -> set[int]:
        """The members of which any input is not finite."""
        if self._is_finite or (self._sum is not None and isfinite(self._sum.item())):
            return set()
        bits, dtype = BITS[self._inputs[0].item_bytes], self._problem.dtype
        return {
            piece.member
            for piece in self._pieces
            for name in ("query", "key", "value")
            if not _is_finite(_part(self._members[piece.member], name, piece, bits), dtype)
        }

    def found(self) -> Iterator[Found]:
        """The results of each piece."""
        heads, width = self._problem.query_heads, self._problem.value_dim
        lse = None if self._lse is None else self._lse.numpy()
        rows = as_bits(self._fetched)
        whole = bytes_of(rows)
        apart = iter(self._fetched_apart)
        begin = 0
        for piece in self._pieces:
            stop = begin + piece.queries
            own_lse = None if lse is None else lse[:, begin:stop]
            if begin < len(rows):
                shape = piece.sequences, piece.query_length, heads, width
                yield Found(piece, rows[begin:stop].reshape(shape), own_lse, begin * rows.strides[0], whole)
            else:
                shape = piece.sequences, heads, piece.query_length, width
                output = as_bits(next(apart)).reshape(shape).swapaxes(1, 2)
                yield Found(piece, output, own_lse, 0, None)
            begin = stop


def _starts(lengths: Iterable[tuple[int, int]]) -> NDArray[np.int32]:
    """Where sequences begin, and where the last one ends. `lengths` has, for some sequences at a time, how many there
    are and the length of each.
    """
    each = itertools.chain.from_iterable(itertools.repeat(length, count) for count, length in lengths)
    return np.array([*itertools.accumulate(each, initial=0)], np.int32)


def _part(request: Request, name: str, piece: Piece, bits: np.dtype[Any]) -> Bits:
    """A piece's part [N, L, H, D] of the queries, keys or values of a request."""
    problem = request.problem
    array = with_axes(np.frombuffer(request.payload(name), bits).reshape(problem.tensors[name].shape), problem)
    start, length = (piece.query_start, piece.query_length) if name == "query" else (piece.kv_start, piece.kv_length)
    return array[piece.first : piece.first + piece.sequences, start : start + length]


def _is_finite(bits: Bits, dtype: int) -> bool:
    """Whether all elements are."""
    exponent = bits.dtype.type(_EXPONENT[dtype])
    return not ((bits & exponent) == exponent).any()


def _is_rearranged(problem: Problem, sequences: int, length: int, heads: int, width: int) -> bool:
    """Whether such sequences are brought into the kernel's order, or out of it, on the device."""
    size = sequences * length * heads * width * TORCH[problem.dtype].itemsize
    return size > REARRANGED and not has_kernel_order(problem, length, heads)
