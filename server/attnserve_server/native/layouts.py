"""Layouts, by which the library recognises requests: those of one layout differ only in the contents of query, key and
value, and in the caches that they refer to.

In: what the requests of a layout have in common, and one of them, as received. Out: what the library keeps of it, a
`struct layout` of `messages.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from attnserve import _fields
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.native.library import CALL_BYTES, pack
from attnserve_server.native.payloads import applies
from attnserve_server.native.requests import planned
from attnserve_server.requests.reply import reply_template

if TYPE_CHECKING:
    from attnserve._wire import Payloads
    from attnserve_server.requests.problem import Problem
    from attnserve_server.requests.request import Request

MOST_SEQUENCES: Final = 256
"""The most sequences in a message, and so in a request."""
MOST_RESULT_BYTES: Final = 1 << 20
"""The most bytes of all results of a message."""

_LAYOUT: Final = struct.Struct("=23q")
_NOWHERE: Final = (0,) * 9
LAYOUT_BYTES: Final = _LAYOUT.size + CALL_BYTES
"""The size of a `struct layout`, without what follows it."""


class Layout(NamedTuple):
    """What every request of a layout comes to: `sequences` calls of a packed shape. `inputs` are the payloads of query,
    key and value. `steps` says how many bytes query, key, value, output and lse advance from one sequence to the next.
    `caches` is the shape of the caches that requests attend to, None without caches; with them, costs depend on their
    lengths and are 0 here.
    """

    problem: Problem
    sequences: int
    shape: bytes
    inputs: Sequence[int]
    steps: Sequence[int]
    output_bytes: int
    lse_bytes: int
    tokens: int
    cost: int = 0
    effort: int = 0
    flops: int = 0
    caches: Hashable = None


def layout_of(request: Request) -> Layout | None:
    """The layout of a request; None if such requests need more than the library does."""
    problem, extent = request.problem, request.extent
    if not (len(request.payloads) == len(problem.tensors) == 3 and applies(problem)):
        return None
    if not (problem.query_length and 0 < problem.batch <= MOST_SEQUENCES and extent.reply_bytes <= MOST_RESULT_BYTES):
        return None
    plan = planned(problem, request.spans)
    (sequences,) = plan.sequences
    return Layout(
        problem=problem,
        sequences=sequences.number,
        shape=sequences.shape,
        inputs=plan.inputs,
        steps=plan.steps[:5],
        output_bytes=plan.output_bytes,
        lse_bytes=plan.reply_bytes - plan.lse_at if plan.lse_at else 0,
        tokens=extent.query_tokens,
        cost=extent.cost,
        effort=request.effort,
        flops=extent.flops,
    )


def packed(layout: Layout, payloads: Payloads, begin: int, length: int) -> bytes | None:
    """What the library keeps of a layout, taken from a request of `length` bytes that begins at `begin` in the message
    with its payloads; None if its references are not adjacent.
    """
    message, end = memoryview(payloads.buffer), begin + length
    places = [(payloads.at + start, payloads.at + behind) for start, behind in payloads.places]
    references = begin, begin
    if layout.caches is not None:
        found = _references(payloads.buffer, begin, end)
        if found is None:
            return None
        references = found
    sizes = [layout.output_bytes, *([layout.lse_bytes] if layout.lse_bytes else [])]
    head, *others = reply_template(layout.problem, sizes)
    middle, tail = (others[0], others[1]) if layout.lse_bytes else (b"", others[0])
    varying = sorted([*places, references] if layout.caches is not None else places)
    edges = [begin, *chain.from_iterable(varying), end]
    pieces = [(start, behind - start) for start, behind in zip(edges[::2], edges[1::2], strict=True)]
    fixed = b"".join(message[start : start + size] for start, size in pieces)
    fields = _LAYOUT.pack(
        length,
        len(pieces),
        len(fixed),
        layout.sequences,
        references[0] - begin,
        references[1] - references[0],
        *(places[place][0] - begin for place in layout.inputs),
        *layout.steps,
        layout.output_bytes,
        layout.lse_bytes,
        len(head),
        len(middle),
        len(tail),
        layout.cost,
        layout.effort,
        layout.flops,
        layout.tokens,
    )
    where = chain.from_iterable((start - begin, size) for start, size in pieces)
    behind = struct.pack(f"={2 * len(pieces)}q", *where) + fixed + head + middle + tail
    return fields + pack(_NOWHERE, layout.shape) + behind


def _references(message: _fields.Buffer, begin: int, end: int) -> tuple[int, int] | None:
    """Where a request's references to caches begin and end, if nothing lies between them."""
    places = [
        (start, behind)
        for number, wire_type, start, _, behind in _fields.fields(message, begin, end)
        if number == pb.AttendRequest.CACHES_FIELD_NUMBER and wire_type == _fields.LENGTH_DELIMITED
    ]
    together = all(one[1] == other[0] for one, other in pairwise(places))
    return (places[0][0], places[-1][1]) if places and together else None
