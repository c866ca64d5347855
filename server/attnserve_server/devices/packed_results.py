"""From what a ragged kernel computed of a pack to what replies carry, on the host; and tensors of requests and replies
as arrays.

In: rows of pieces, where they were fetched to. Out: the bytes of replies: the rows where they lie, if they have the
order of the reply, else a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.devices.packing import Piece
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.work import RequestResult

BITS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
"""The type as which elements of so many bytes are copied and looked at: NumPy has no fast operations on half
precisions.
"""

Bits: TypeAlias = NDArray[Any]


class Found(NamedTuple):
    """Rows of one piece: output [N, L, H, Dv], or a view of it, as bits, and lse [H, N * L]. `whole` is all that the
    kernel put out, and `begin` where this output begins in it, in bytes. `whole` is None if this output has memory of
    its own.
    """

    piece: Piece
    output: Bits
    lse: NDArray[np.float32] | None
    begin: int
    whole: memoryview | None


def with_axes(array: Bits, problem: Problem) -> Bits:
    """A tensor of a request, or of its reply, as [N, L, H, D]; N is 1 where sequences are packed."""
    if array.ndim == 2:
        return array[None, :, None]
    if array.ndim == 3:
        array = array[None]
    return array if problem.length_first else array.swapaxes(1, 2)


def has_kernel_order(problem: Problem, length: int, heads: int) -> bool:
    """Whether sequences of a length lie in a request or reply as in a kernel's inputs and output."""
    return problem.tokens_first or length == 1 or heads == 1


def result_of(problem: Problem, found: Sequence[Found]) -> RequestResult:
    """The result of a request from those of its pieces, which are all of its queries."""
    return RequestResult(_output(problem, found), _lse(problem, found) if problem.return_lse else None, None)


def _output(problem: Problem, found: Sequence[Found]) -> memoryview:
    """The output of a reply: where it was fetched to, if it lies there as in the reply, or a copy."""
    if not found:
        return memoryview(b"")
    first = found[0]
    if first.whole is not None and _is_in_order(problem, found):
        return first.whole[first.begin : first.begin + sum(each.output.nbytes for each in found)]
    if first.whole is None and len(found) == 1:
        return bytes_of(first.output.swapaxes(1, 2))
    heads, length, width = problem.query_heads, problem.query_length, problem.value_dim
    sequences = 1 if problem.packed else problem.batch
    shape = (sequences, length, heads, width) if problem.tokens_first else (sequences, heads, length, width)
    output = np.empty(shape, first.output.dtype)
    rows = output if problem.tokens_first else output.swapaxes(1, 2)
    for piece, part, *_ in found:
        start = piece.query_start
        rows[piece.first : piece.first + piece.sequences, start : start + piece.query_length] = part
    return bytes_of(output)


def _is_in_order(problem: Problem, found: Sequence[Found]) -> bool:
    """Whether the rows of pieces were fetched in the order of the reply, one piece after the other."""
    place, before = found[0].begin, (-1, -1)
    for each in found:
        has_order = has_kernel_order(problem, each.piece.query_length, problem.query_heads)
        own = each.piece.first, each.piece.query_start
        if each.whole is not found[0].whole or each.begin != place or own < before or not has_order:
            return False
        place, before = place + each.output.nbytes, own
    return True


def _lse(problem: Problem, found: Sequence[Found]) -> memoryview:
    """The lse of a reply, [N, H, L]."""
    heads = problem.query_heads
    lse = np.empty((1 if problem.packed else problem.batch, heads, problem.query_length), np.float32)
    for piece, _, part, *_ in found:
        assert part is not None
        start, length = piece.query_start, piece.query_length
        rows = part.reshape(heads, piece.sequences, length).swapaxes(0, 1)
        lse[piece.first : piece.first + piece.sequences, :, start : start + length] = rows
    return bytes_of(lse)


def as_bits(tensor: torch.Tensor) -> Bits:
    """A packed host tensor of 2 or 4 bytes an element, as an array."""
    return tensor.view(-1).view(torch.uint8).numpy().view(BITS[tensor.element_size()]).reshape(tensor.shape)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of an array; of a copy, if it is not packed."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
