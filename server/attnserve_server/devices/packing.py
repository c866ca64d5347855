"""From requests to ragged kernel calls: sequences of many requests packed end to end, tokens first.

`pack` decides, from requests alone, which of them go together and where each of their sequences lies; `StagedPack`
moves the tensors, on whatever device they are. The unit that moves is a row: [D] of one head of one token. The payloads
of a pack's requests lie end to end as received, each in its own layout; rows are gathered from there into the kernel's
order, and scattered back into the order of the payloads, which is that of the replies. So the number of operations on
the device does not grow with the number of requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve import _dtypes
from attnserve_server.devices.arrangement import Arrangement, PackedSequence
from attnserve_server.devices.inputs import Allocate, fill
from attnserve_server.devices.staging import TORCH, Upload
from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import add_sinks
from attnserve_server.kernels.fused import is_fusable
from attnserve_server.kernels.math import needs_float64
from attnserve_server.kernels.ragged import ALIGNMENT, MAX_SEQUENCES, RaggedCall, RaggedKernel
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request

FEW_ROWS = 1 << 14
"""Where so many rows of queries and keys are is found on the host."""

Window = tuple[int, int]


@dataclass(slots=True)
class Pack:
    """Requests, by their places in the batch, that one kernel computes together, in separate calls for each window.

    `query_rows` and `kv_rows` hold where each request's rows begin, then the total.
    """

    kernel: RaggedKernel
    problem: Problem
    places: list[int] = field(default_factory=list)
    sequences: dict[Window, list[PackedSequence[int]]] = field(default_factory=dict)
    query_rows: list[int] = field(default_factory=lambda: [0])
    kv_rows: list[int] = field(default_factory=lambda: [0])

    def add(self, place: int, request: Request, windows: list[tuple[Window, int, int]]) -> None:
        """Adds a request, given for each of its spans the window and where the keys within reach begin and end."""
        problem, member = request.problem, len(self.places)
        queries = _Rows.of(problem, problem.query_heads, problem.query_length, self.query_rows[-1])
        keys = _Rows.of(problem, problem.kv_heads, problem.kv_length, self.kv_rows[-1])
        for span, (window, begin, end) in zip(request.spans, windows, strict=True):
            if not span.query_length:
                continue
            for number in range(span.first, span.first + span.sequences):
                lse_start = span.query_start
                if not problem.packed:
                    lse_start = number * problem.query_heads * problem.query_length
                sequence = PackedSequence[int](
                    member,
                    queries.start(number, span.query_start),
                    queries.token,
                    queries.head,
                    span.query_length,
                    keys.start(number, span.kv_start + begin),
                    keys.token,
                    keys.head,
                    end - begin,
                    self.query_rows[-1] + lse_start,
                    problem.query_length,
                )
                self.sequences.setdefault(window, []).append(sequence)
        self.places.append(place)
        self.query_rows.append(queries.end)
        self.kv_rows.append(keys.end)


class _Rows(NamedTuple):
    """Where the rows of a tensor are, with the steps from token to token, head to head and sequence to sequence."""

    begin: int
    end: int
    token: int
    head: int
    sequence: int

    @staticmethod
    def of(problem: Problem, heads: int, length: int, begin: int) -> _Rows:
        """The rows of a tensor of `length` tokens (in total where packed) that begins at the row `begin`."""
        token, head = (heads, 1) if problem.tokens_first else (1, length)
        if problem.packed:
            return _Rows(begin, begin + length * heads, token, head, 0)
        return _Rows(begin, begin + problem.batch * length * heads, token, head, length * heads)

    def start(self, sequence: int, token: int) -> int:
        """The row of a token, in the first head."""
        return self.begin + sequence * self.sequence + token * self.token


def pack(requests: Sequence[Request], kernels: Sequence[RaggedKernel]) -> tuple[list[Pack], list[int]]:
    """The packs that kernels can compute, and the places of all other requests."""
    packs: dict[Hashable, Pack] = {}
    others: list[int] = []
    for place, request in enumerate(requests):
        kernel = _kernel(request.problem, kernels)
        windows = None if kernel is None else _windows(request, kernel)
        if kernel is None or windows is None:
            others.append(place)
            continue
        group = request.problem.group
        if group not in packs:
            packs[group] = Pack(kernel, request.problem)
        packs[group].add(place, request, windows)
    return list(packs.values()), others


def _kernel(problem: Problem, kernels: Sequence[RaggedKernel]) -> RaggedKernel | None:
    """The kernel for a problem, if one takes it at any lengths."""
    if not is_fusable(problem):
        return None
    if problem.tensors.keys() & {"mask", "bias", "alibi_slopes"} or problem.query_heads > MAX_SEQUENCES:
        return None
    if needs_float64(problem.scale, problem.softcap):
        return None
    dtype, width = TORCH[problem.dtype], max(problem.head_dim, problem.value_dim)
    return next((kernel for kernel in kernels if dtype in kernel.dtypes and width <= kernel.max_width), None)


def _windows(request: Request, kernel: RaggedKernel) -> list[tuple[Window, int, int]] | None:
    """For each span its window and the range of keys within reach; None if the kernel cannot compute one of them."""
    problem, found = request.problem, []
    for span in request.spans:
        if not span.query_length:
            found.append(((-1, -1), 0, 0))
            continue
        band = Band.of(span.query_length, span.kv_length, span.offset, problem.causal, problem.window)
        band, begin, end = band.narrowed()
        window = kernel.window(band) if begin < end else None
        if window is None:
            return None
        found.append((window, begin, end))
    return found


@dataclass(slots=True)
class PackResult:
    """output [R, Dv], R being all query rows, in the order of the replies; lse [R] likewise, if asked for.

    `suspect` [M] is true for requests whose queries, keys or values are not all finite: their results have no
    meaning. `calls` counts the kernel's calls.
    """

    output: torch.Tensor
    lse: torch.Tensor | None
    suspect: torch.Tensor
    calls: int


class StagedPack:
    """A pack whose tensors are on the device, or on their way."""

    def __init__(self, pack: Pack, requests: Sequence[Request], allocate: Allocate, upload: Upload) -> None:
        self._pack = pack
        self._allocate, self._upload = allocate, upload
        members = [requests[place] for place in pack.places]
        problem = pack.problem
        self._query = self._concatenated(members, "query", problem.head_dim)
        self._key = self._concatenated(members, "key", problem.key_dim)
        self._value = self._concatenated(members, "value", problem.value_dim)
        self._sinks = None
        if "sinks" in problem.tensors:
            self._sinks = self._sent([torch.from_numpy(np.stack([_sinks(member) for member in members]))])[0]
        self._calls = [
            (window, some, self._arranged(some))
            for window, sequences in pack.sequences.items()
            for some in (sequences[at : at + MAX_SEQUENCES] for at in range(0, len(sequences), MAX_SEQUENCES))
        ]

    def run(self) -> PackResult:
        """Computes the pack on the current stream, without waiting for anything."""
        pack, problem = self._pack, self._pack.problem
        rows, device = pack.query_rows[-1], self._query.device
        output = torch.empty(rows, problem.value_dim, dtype=self._query.dtype, device=device)
        lse = torch.empty(rows, dtype=torch.float32, device=device) if problem.return_lse else None
        sums = torch.zeros(len(pack.places), dtype=torch.float32, device=device)
        for window, sequences, arranged in self._calls:
            self._run_call(window, sequences, arranged() if callable(arranged) else arranged, output, lse, sums)
        # A sum is finite only if all its terms are: only then the difference is 0.
        return PackResult(output, lse, sums - sums != 0, len(self._calls))

    def _arranged(self, sequences: list[PackedSequence[int]]) -> Arrangement | Callable[[], Arrangement]:
        """Where the rows of sequences are: found here and sent if there are few, as that takes fewer operations on the
        device, which is what a small batch waits for; else found there, once the call runs.
        """
        problem, table = self._pack.problem, torch.from_numpy(np.array(sequences, np.int64))
        queries, keys = (
            sum(each) for each in zip(*((one.query_length, one.kv_length) for one in sequences), strict=True)
        )
        sizes = queries, keys, problem.query_heads, problem.kv_heads
        if queries * problem.query_heads + keys * problem.kv_heads <= FEW_ROWS:
            return Arrangement(*self._sent(_arrangement(table, *sizes)))
        # Not of `self`: a cycle would keep all inputs on the device until garbage is collected.
        return partial(_arrangement, self._sent([table])[0], *sizes)

    def _run_call(
        self,
        window: Window,
        sequences: list[PackedSequence[int]],
        at: Arrangement,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        sums: torch.Tensor,
    ) -> None:
        """Computes some sequences, writes their rows into the results, and adds their inputs to the sums."""
        problem = self._pack.problem
        query, key, value = self._query[at.query_rows], self._key[at.kv_rows], self._value[at.kv_rows]
        result = self._pack.kernel.attend(
            RaggedCall(
                query,
                key,
                value,
                at.query_starts,
                at.kv_starts,
                at.query_sequence,
                max(sequence.query_length for sequence in sequences),
                max(sequence.kv_length for sequence in sequences),
                problem.scale,
                window,
                problem.return_lse or self._sinks is not None,
            )
        )
        if self._sinks is not None:
            assert result.lse is not None
            result.output, result.lse = add_sinks(result.output, result.lse, self._sinks[at.query_member])
        output[at.query_rows] = result.output
        if lse is not None and result.lse is not None:
            lse[at.lse_rows] = result.lse
        for tensor, member in ((query, at.query_member), (key, at.kv_member), (value, at.kv_member)):
            sums.index_add_(0, member, tensor.sum((1, 2), dtype=torch.float32))

    def _concatenated(self, members: Sequence[Request], name: str, width: int) -> torch.Tensor:
        """The rows [R, D] of a tensor of all members."""
        payloads = [member.payload(name) for member in members]
        raw = self._allocate(sum(map(len, payloads)))
        fill(raw, payloads)
        return self._upload(raw.view(TORCH[self._pack.problem.dtype])).view(-1, width)

    def _sent(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Small host tensors, by one upload."""
        ends = list(itertools.accumulate((-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors), initial=0))
        raw = self._allocate(ends[-1])
        parts = [(raw[start : start + each.nbytes], each) for start, each in zip(ends, tensors, strict=False)]
        for part, each in parts:
            part.view(each.dtype).view(each.shape).copy_(each)
        sent = self._upload(raw)
        return [
            sent[start : start + each.nbytes].view(each.dtype).view(each.shape)
            for start, each in zip(ends, tensors, strict=False)
        ]


def _arrangement(table: torch.Tensor, queries: int, keys: int, query_heads: int, kv_heads: int) -> Arrangement:
    return Arrangement.of(PackedSequence[torch.Tensor](*table.unbind(1)), queries, keys, query_heads, kv_heads)


def _sinks(request: Request) -> NDArray[Any]:
    """A request's sinks [Hq] in float32."""
    dtype = _dtypes.NUMPY[request.problem.tensors["sinks"].dtype]
    return np.frombuffer(request.payload("sinks"), dtype).astype(np.float32)


def rows_of_members(pack: Pack) -> Iterator[tuple[int, slice]]:
    """The place in the batch of each of a pack's requests, and its rows in the results."""
    for place, start, stop in zip(pack.places, pack.query_rows, pack.query_rows[1:], strict=False):
        yield place, slice(start, stop)
