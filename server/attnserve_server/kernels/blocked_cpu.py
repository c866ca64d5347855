"""Attention of many queries to many keys on a CPU with AVX-512: blocks of scores, multiplied by oneDNN.

torch's flash kernel multiplies by MKL, which uses half the width of the vectors on processors that are not Intel's.
Here a block of queries is computed over many keys at once. Weights are powers of 2, which torch computes faster than
those of e, and are not shifted by the largest score of their row unless their sum shows that they have to be: then the
block is computed again, and the rows in question are replaced.

oneDNN generates code for each new shape, which takes longer than running it: blocks have few shapes, and the excess at
their ends is excluded like other keys. NaN and infinities show in the output; such heads are computed again by the math
kernel, and so are those with a row whose scores have all overflowed to minus infinity. Each block of a head is computed
by itself: a row's bits depend on nothing but its request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import log
from typing import Any

import torch
from torch.nn.functional import pad

from attnserve_server.host.cpus import is_amd
from attnserve_server.kernels import written_out
from attnserve_server.kernels.bias import VECTOR_ELEMENTS, add_sinks, exclusion, nothing_to_attend
from attnserve_server.kernels.blocks import KEY_GRID, Block, plan
from attnserve_server.kernels.call import AttentionCall, AttentionResult
from attnserve_server.kernels.finite import surely_finite
from attnserve_server.kernels.fused import is_fusable

NAME = "cpu_blocked"

LEAST_ROWS, LEAST_KEYS = 64, 192
LEAST_PRODUCTS, LEAST_CAUSAL_PRODUCTS = 1 << 23, 1 << 25
"""With fewer rows of queries, fewer keys or fewer products of their elements for a key head, torch's flash kernel is as
fast; up to some length it is better at causal queries, which therefore need more products here. Measured on one core,
8 heads of 64: 18.0 ms to 10.6 at 1,024 causal queries; the same time at 192 that see all keys, and at 500 causal ones.
"""
MAX_WIDTH = 192
"""oneDNN adds the products of a row in float32, one after the other: at 256 elements the error of unit-normal inputs
reached 2.0e-6, at 512 2.8e-6, and the contract has 2e-6. The flash kernel stays below 1.3e-6 at any width.
"""
MAX_SCALE = 2.0**20
"""Queries are scaled, not scores; by more than this, or less than its inverse, they might leave their range."""
SAFE_TOTAL = 2.0**100
"""A sum of weights up to this, and down to its inverse, has lost nothing to the range of float32."""
EXCLUDED_ELEMENTS = 1 << 22
"""The most elements that say which keys are excluded for a block of queries whose weights sum to 0."""
LN_2, LOG2_E = log(2), 1 / log(2)
MINUS_INFINITY_BITS = -(1 << 23)
"""The bits of minus infinity in float32, as those of an int32."""

_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
"""oneDNN's product, which is private to torch and not in all builds."""
AVAILABLE: bool = _linear is not None and torch.backends.cpu.get_cpu_capability() == "AVX512" and is_amd()


def applies(call: AttentionCall) -> bool:
    """Whether this kernel can compute a call, and is the fastest at it."""
    query, key = call.query, call.key
    rows, keys = query.shape[2] * (query.shape[1] // key.shape[1]), key.shape[2]
    products = rows * keys * (query.shape[3] + call.value.shape[3])
    return (
        products >= (LEAST_CAUSAL_PRODUCTS if call.causal and call.offset == 0 else LEAST_PRODUCTS)
        and rows >= LEAST_ROWS
        and keys >= LEAST_KEYS
        and max(query.shape[3], call.value.shape[3]) <= MAX_WIDTH
        and query.dtype == torch.float32
        and query.device.type == "cpu"
        and is_fusable(call)
        and call.alibi_slopes is None
        and 1 / MAX_SCALE <= abs(call.scale) <= MAX_SCALE
    )


def attend(call: AttentionCall) -> AttentionResult:
    """Computes a call to which this kernel applies."""
    # Tells OpenMP how many threads to use in a thread that torch has not computed in yet: oneDNN does not ask torch.
    torch.get_num_threads()
    (count, heads, query_length, _), kv_heads = call.query.shape, call.key.shape[1]
    group = heads // kv_heads
    rows, blocks = plan(call.band, group)
    if not blocks:
        return nothing_to_attend(call, NAME)
    reaching = slice(blocks[0].start, blocks[-1].stop)
    output = call.query.new_empty(count, heads, query_length, call.value.shape[-1])
    if reaching != slice(0, query_length):
        output.zero_()
    # A row's bits must not depend on its place, but elements behind the last whole vector are computed in another way.
    total = call.query.new_zeros(count, heads, -(-query_length // VECTOR_ELEMENTS) * VECTOR_ELEMENTS)
    shift = torch.zeros_like(total)
    for n, kv_head in product(range(count), range(kv_heads)):
        mine = n, slice(kv_head * group, (kv_head + 1) * group), reaching
        output[mine], total[mine], shift[mine] = _Head(call, *mine, kv_head, rows, blocks).attend()
    lost = None
    if not total[..., reaching].all():
        lost = _lost(call.queries(reaching.start, reaching.stop), total[..., reaching] == 0)
    lse = None
    if call.return_lse or call.sinks is not None:
        # Shifts are in units of the scores.
        lse = total.log2_().mul_(LN_2).add_(shift, alpha=LN_2 if call.bias is None else 1)[..., :query_length]
        if call.sinks is not None:
            output, lse = add_sinks(output, lse, call.sinks[None, :, None])
    if lost is not None or not surely_finite(output):
        sound = torch.isfinite(output).view(count, kv_heads, -1).all(2)
        if lost is not None:
            sound &= ~lost.view(count, kv_heads, -1).any(2)
        written_out.attend_heads(call, torch.nonzero(~sound).tolist(), output, lse)
    return AttentionResult(output, lse if call.return_lse else None, None, NAME)


def _lost(call: AttentionCall, zero: torch.Tensor) -> torch.Tensor | None:
    """Which of the rows [N, Hq, Lq] whose sums of weights are `zero` have a key to attend; None if none has."""
    count, heads, query_length = zero.shape
    step = max(1, EXCLUDED_ELEMENTS // (count * heads * call.key.shape[2]))
    for start in range(0, query_length, step):
        rows = zero[..., start : start + step]
        if rows.any():
            rows &= ~_are_empty(call.queries(start, min(start + step, query_length)))
    return zero if zero.any() else None


def _are_empty(call: AttentionCall) -> torch.Tensor:
    """Bool that broadcasts to a call's rows [N, Hq, Lq], true where every key is excluded or has a bias of -inf."""
    excluded = exclusion(call, call.band, 0, call.key.shape[2], False)
    if call.bias is not None:
        lowest = call.bias == -torch.inf
        excluded = lowest if excluded is None else lowest | excluded
    return torch.tensor(False) if excluded is None else excluded.all(-1)


class _Head:
    """A key head of a sequence, and the G query heads that read it, some of whose queries are computed in B blocks.

    Scores are in units of log 2, or of 1 where there are biases, since some of those would overflow in the former.
    """

    def __init__(
        self,
        call: AttentionCall,
        n: int,
        heads: slice,
        queries: slice,
        kv_head: int,
        rows: int,
        blocks: Sequence[Block],
    ) -> None:
        query = call.query[n, heads, queries]
        self._key, self._value = (_on_grid(part[n, kv_head].to(query.dtype)) for part in (call.key, call.value))
        self._mask, self._bias = (_of_heads(part, n, heads) for part in (call.mask, call.bias))
        self._blocks = blocks
        self._group, self._length, width = query.shape
        query = query * (call.scale if self._bias is not None else call.scale * LOG2_E)
        if self._length < len(blocks) * rows:
            query = pad(query, (0, 0, 0, len(blocks) * rows - self._length))
        query = query.view(self._group, len(blocks), rows, width).transpose(0, 1)
        # By blocks: [B, G * R, n]; rows behind a head's last query are meaningless.
        self._query = query.reshape(len(blocks), self._group * rows, width)
        self._output = self._query.new_empty(*self._query.shape[:2], self._value.shape[1])
        self._total, self._shift = self._query.new_zeros(2, *self._query.shape[:2], 1)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output [G, Lq, Dv]; for each query, [G, Lq] each, the sum of its weights, and the shift that was subtracted
        from its scores before.
        """
        parts = self._blocks, self._query, self._output, self._total
        if self._bias is None:
            for block, query, output, total in zip(*parts, strict=True):
                self._attend(block, query, output, total)
        if not _in_range(self._by_query(self._total)).all():
            for block, query, output, total, shift in zip(*parts, self._shift, strict=True):
                self._attend_shifted(block, query, output, total, shift)
        output, total, shift = map(self._by_query, (self._output, self._total, self._shift))
        return output, total.squeeze(-1), shift.squeeze(-1)

    def _attend(self, block: Block, query: torch.Tensor, output: torch.Tensor, total: torch.Tensor) -> None:
        """Computes a block as if its scores were small, and its sums of weights, which show if they are not."""
        parts = self._scores(block, query)
        scores, value = next(parts)
        weights = scores.exp2_()
        weighted = _multiply(weights, value)
        torch.sum(weights, -1, keepdim=True, out=total)
        for scores, value in parts:
            weights = scores.exp2_()
            weighted.add_(_multiply(weights, value))
            total.add_(weights.sum(-1, keepdim=True))
        torch.div(weighted, total, out=output)

    def _attend_shifted(
        self, block: Block, query: torch.Tensor, output: torch.Tensor, total: torch.Tensor, shift: torch.Tensor
    ) -> None:
        """Computes those rows again whose sums are not in range, with a row's largest score subtracted from all."""
        done = _in_range(total)
        if done.all():
            return
        weighted, sums = torch.zeros_like(output), torch.zeros_like(total)
        taken = top = torch.full_like(total, -torch.inf)
        for scores, value in self._scores(block, query):
            before, top = top, torch.maximum(top, scores.amax(-1, keepdim=True))
            # Where no key has been attended so far, nothing is subtracted.
            taken = top.masked_fill(top == -torch.inf, 0)
            weights, fade = self._powers(scores.sub_(taken)), self._powers(before - taken)
            weighted.mul_(fade).add_(_multiply(weights, value))
            sums.mul_(fade).add_(weights.sum(-1, keepdim=True))
        weighted.div_(sums.masked_fill(sums == 0, 1))
        for old, new in ((output, weighted), (total, sums), (shift, taken)):
            torch.where(done, old, new, out=old)

    def _scores(self, block: Block, query: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The scores [G * R, S] of each part of the keys, and its values [Dv, S]."""
        for part in block.parts:
            scores = _multiply(query, self._key[part.keys])
            if part.edges or self._bias is not None or self._mask is not None:
                by_head = scores.view(self._group, -1, scores.shape[1])
                for edge in part.edges:
                    by_head[..., edge.keys].add_(edge.added)
                if self._bias is not None:
                    _add(by_head, _of_part(self._bias, block, part.keys))
                if self._mask is not None:
                    _add(by_head, _exclusion(_of_part(self._mask, block, part.keys)))
            yield scores, self._value[part.keys].t()

    def _powers(self, scores: torch.Tensor) -> torch.Tensor:
        """The weights of scores, computed in place."""
        return (scores if self._bias is None else scores.mul_(LOG2_E)).exp2_()

    def _by_query(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by blocks [B, G * R, n] as queries of heads [G, Lq, n]."""
        by_head = rows.view(len(rows), self._group, -1, rows.shape[-1]).transpose(0, 1)
        return by_head.reshape(self._group, -1, rows.shape[-1])[:, : self._length]


def _multiply(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The product of each row [m, k] with each column [n, k]: [m, n]. Columns may be the transpose of packed ones."""
    result: torch.Tensor = _linear(rows, columns, None, "none", [], "")
    return result


def _add(scores: torch.Tensor, part: torch.Tensor) -> None:
    """Adds something [G or 1, n or 1, m] to the scores [G, R, S] of the first n queries, or of all, and m keys."""
    queries = slice(part.shape[1]) if part.shape[1] > 1 else slice(None)
    scores[:, queries, : part.shape[2]].add_(part)


def _in_range(total: torch.Tensor) -> torch.Tensor:
    """Where sums of weights have lost nothing to the range of float32."""
    return (total >= 1 / SAFE_TOTAL) & (total <= SAFE_TOTAL)


def _on_grid(tensor: torch.Tensor) -> torch.Tensor:
    """Keys or values [S, D], packed, with zeros behind them up to a multiple of KEY_GRID."""
    missing = -len(tensor) % KEY_GRID
    return pad(tensor, (0, 0, 0, missing)) if missing else tensor.contiguous()


def _of_heads(tensor: torch.Tensor | None, n: int, heads: slice) -> torch.Tensor | None:
    """The part [G or 1, Lq or 1, S or 1] of a mask or bias of rank 4 for some heads of sequence n."""
    if tensor is None:
        return None
    tensor = tensor[n if len(tensor) > 1 else 0]
    return tensor[heads] if len(tensor) > 1 else tensor


def _of_part(tensor: torch.Tensor, block: Block, keys: slice) -> torch.Tensor:
    """What such a part has for a block's queries and some of the keys."""
    if tensor.shape[1] > 1:
        tensor = tensor[:, block.start : block.stop]
    return tensor[..., keys] if tensor.shape[2] > 1 else tensor.expand(-1, -1, keys.stop - keys.start)


def _exclusion(mask: torch.Tensor) -> torch.Tensor:
    """0 where a mask is true, and minus infinity elsewhere; several times as fast as `masked_fill`."""
    return mask.view(torch.uint8).int().sub_(1).bitwise_and_(MINUS_INFINITY_BITS).view(torch.float32)
