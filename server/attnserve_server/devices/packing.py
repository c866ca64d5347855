"""Which requests go to ragged kernels together, and in which calls: decided from the requests alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from attnserve_server.devices.staging import TORCH
from attnserve_server.kernels.band import Band
from attnserve_server.kernels.ragged import MAX_SEQUENCES, RaggedKernel
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.scores import is_fusable

CALL_BYTES: Final = 1 << 28
"""Calls of more bytes of inputs are divided, if they have several pieces: one is copied while another computes."""
CALL_ROWS: Final = 1 << 26
"""Calls are also divided if they would have more rows of queries than this, were all their sequences as long as the
longest. Some kernels write an lse for each of these rows, together 256 MiB, and start thread blocks for all of them.
"""

Window = tuple[int, int]


class Piece(NamedTuple):
    """`sequences` sequences of equal lengths of the pack's request `member`, in one kernel call.

    The sequences are those from `first` on. In each, the queries are those from `query_start` on, and the keys those
    from `kv_start` on: only those within reach of the queries.
    """

    member: int
    first: int
    sequences: int
    query_start: int
    query_length: int
    kv_start: int
    kv_length: int

    @property
    def queries(self) -> int:
        """The queries of all its sequences."""
        return self.sequences * self.query_length

    @property
    def keys(self) -> int:
        """The keys of all its sequences."""
        return self.sequences * self.kv_length

    def divided(self, most: int) -> Iterator[Piece]:
        """The piece, divided into pieces of at most so many sequences."""
        for begin in range(0, self.sequences, most):
            yield self._replace(first=self.first + begin, sequences=min(most, self.sequences - begin))


@dataclass(slots=True)
class Pack:
    """Requests, by their places in the batch, that one kernel computes together, in separate calls for each window."""

    kernel: RaggedKernel
    problem: Problem
    places: list[int] = field(default_factory=list)
    pieces: dict[Window, list[Piece]] = field(default_factory=dict)

    def add(self, place: int, request: Request, windows: list[tuple[Window, int, int]]) -> None:
        """Adds a request, given for each of its spans the window and where the keys within reach begin and end."""
        member = len(self.places)
        self.places.append(place)
        for span, (window, begin, end) in zip(request.spans, windows, strict=True):
            if span.sequences and span.query_length:
                first = 0 if request.problem.packed else span.first
                start, length = span.query_start, span.query_length
                piece = Piece(member, first, span.sequences, start, length, span.kv_start + begin, end - begin)
                self.pieces.setdefault(window, []).append(piece)

    def calls(self) -> Iterator[tuple[Window, list[Piece]]]:
        """The calls of the kernel: the window and the pieces of each."""
        row_bytes = self.problem.query_heads * self.problem.head_dim * TORCH[self.problem.dtype].itemsize
        rows = CALL_ROWS // self.problem.query_heads
        for window, pieces in self.pieces.items():
            if sum(piece.sequences for piece in pieces) * max(piece.query_length for piece in pieces) > rows:
                pieces = sorted(pieces, key=lambda piece: piece.query_length)  # the long ones apart from the short
            some: list[Piece] = []
            sequences = size = longest = 0
            for piece in (part for whole in pieces for part in whole.divided(_most_sequences(whole, rows))):
                own = piece.queries * row_bytes + piece.keys * self.problem.token_bytes
                together, highest = sequences + piece.sequences, max(longest, piece.query_length)
                if some and (together > MAX_SEQUENCES or size + own > CALL_BYTES or together * highest > rows):
                    yield window, some
                    some, together, highest, size = [], piece.sequences, piece.query_length, 0
                some.append(piece)
                sequences, longest, size = together, highest, size + own
            yield window, some


def _most_sequences(piece: Piece, rows: int) -> int:
    """How many sequences of a piece are in one call, which has so many rows of queries in all."""
    return max(1, min(MAX_SEQUENCES, rows // piece.query_length))


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
    dtype, width = TORCH[problem.dtype], max(problem.head_dim, problem.value_dim)
    return next((kernel for kernel in kernels if dtype in kernel.dtypes and width <= kernel.max_width), None)


def _windows(request: Request, kernel: RaggedKernel) -> list[tuple[Window, int, int]] | None:
    """For each span its window and the range of keys within reach; None if the kernel cannot compute one of them."""
    problem, found = request.problem, []
    for span in request.spans:
        if not span.query_length:
            found.append(((-1, -1), 0, 0))
            continue
        band = Band(span.query_length, span.kv_length, span.offset, *problem.window)
        band, begin, end = band.narrowed()
        window = kernel.window(band) if begin < end else None
        if window is None:
            return None
        found.append((window, begin, end))
    return found
