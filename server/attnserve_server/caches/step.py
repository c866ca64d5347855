"""A few queries over a cache on a CPU without the native kernel, such as a step: matrix products over whole pages.

In: a query and the pages it attends to. Out: computations, each over some of the pages; one result. All scores of a
computation are kept in memory, so that all keys are read in sequence, and then all values: few queries over many keys
spend their time on these reads. A result follows from the query and the tokens alone: a product's bits depend neither
on how many others are computed in the same call nor, if they are aligned, on where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch.nn.functional import pad

from attnserve_server.caches.merge import merge
from attnserve_server.caches.page_memory import STORAGE
from attnserve_server.caches.pages import Block, PagePool
from attnserve_server.caches.query import CacheQuery, has_few_queries, lacks_keys
from attnserve_server.caches.shape import TOKEN_MULTIPLE
from attnserve_server.kernels import AttentionResult, part_of
from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import add_sinks, alibi
from attnserve_server.kernels.finite import surely_finite
from attnserve_server.kernels.flash_cpu import ROW_ELEMENTS
from attnserve_server.kernels.table import CPU_PAGES

PIECE_BYTES: Final = 1 << 24
"""How many bytes of pages one computation covers: the next one over these finds them in the processor's cache."""
CONVERTED_BYTES: Final = 1 << 19
"""How many bytes of converted keys or values are made at a time: they are used while in the processor's cache."""


@dataclass(slots=True)
class Step:
    """Queries that all reach some keys from `begin` to `end`, the band's reach, in pages that are finite."""

    query: CacheQuery
    tensor: torch.Tensor
    """[1, Hk, R, D]: the queries in the dtype of computation; the R rows of a key head are the queries that read it."""
    band: Band
    begin: int
    end: int
    per_page: int
    pieces: list[tuple[int, list[Block]]]
    """Runs of pages, each with its first token."""

    @staticmethod
    def of(query: CacheQuery, pool: PagePool) -> Step | None:
        """What there is to compute; None if the query is to be computed in another way."""
        shape, tensor = query.shape, query.query
        per_page = pool.tokens_per_page(shape)
        if per_page % TOKEN_MULTIPLE or shape.head_dim % ROW_ELEMENTS or shape.value_dim % ROW_ELEMENTS:
            return None
        if not has_few_queries(query, per_page):
            return None
        band = query.band
        begin, end = band.reach()
        if begin == end or not surely_finite(tensor, query.bias):
            return None
        first, last = begin // per_page, -(-end // per_page)
        each = max(1, PIECE_BYTES // pool.memory.page_bytes)
        count = -(-(last - first) // each)
        pieces = []
        for place in range(count):
            start, stop = (first + (last - first) * edge // count for edge in (place, place + 1))
            pages = pool.whole(shape, query.pages[start:stop], min(end, stop * per_page) - start * per_page)
            if pages is None:
                return None
            pieces.append((start * per_page, pages))
        # Half precision is no faster here, and this way partial results are not rounded before they are merged.
        dtype = torch.promote_types(torch.promote_types(tensor.dtype, STORAGE[shape.dtype]), torch.float32)
        rows = tensor.to(dtype).reshape(1, shape.num_kv_heads, -1, shape.head_dim)
        return Step(query, rows, band, begin, end, per_page, pieces)

    @property
    def flops(self) -> int:
        """What it costs."""
        _, heads, rows, width = self.tensor.shape
        return 2 * heads * rows * (self.end - self.begin) * (width + self.query.shape.value_dim)

    def computations(self) -> Iterator[tuple[int, Callable[[], AttentionResult]]]:
        """The computations, each with the page that it begins with, in the order in which `take` expects results."""
        for first_token, blocks in self.pieces:
            yield blocks[0].first_page, partial(self._attend, first_token, blocks)

    def take(self, results: Sequence[AttentionResult]) -> AttentionResult | None:
        """The result, from those of all computations; None if values or scores may have left the range of float32."""
        query = self.query
        if any(result.suspect is not None for result in results):  # the sign of an infinite score means nothing
            return None
        output, lse = results[0].output, results[0].lse
        if len(results) > 1:
            output, lse = merge(
                [each.output for each in results], [each.lse for each in results if each.lse is not None]
            )
        if not surely_finite(output) or not (lse is None or self._is_sound(lse)):
            return None
        if query.sinks is not None and lse is not None:
            output, lse = add_sinks(output, lse, query.sinks[None, :, None])
        output = output.to(query.query.dtype)
        return AttentionResult(output, lse if query.return_lse else None, None, CPU_PAGES)

    def _attend(self, first_token: int, blocks: list[Block]) -> AttentionResult:
        """The result over some pages: output [1, Hq, Lq, Dv] and, if it is needed, lse [1, Hq, Lq]."""
        query, (_, kv_heads, rows, _) = self.query, self.tensor.shape
        _, heads, length, _ = query.query.shape
        count = sum(len(block.key) for block in blocks)
        scores = self.tensor.new_empty(count, kv_heads, rows, self.per_page)
        outputs = self.tensor.new_empty(count, kv_heads, rows, query.shape.value_dim)
        at = 0
        for block in blocks:
            to = at + len(block.key)
            _multiply(self.tensor.expand(to - at, -1, -1, -1), block.key.mT, query.scale, scores[at:to])
            at = to
        held = self.end - first_token - (count - 1) * self.per_page
        scores[-1, ..., held:] = 0  # keys behind the tokens are unspecified
        suspect = None if surely_finite(scores) or scores.isfinite().all() else scores.new_ones(1, dtype=torch.bool)
        shift = self._bias(scores.view(count, heads, length, self.per_page), first_token)
        top = scores.amax((0, 3), keepdim=True)
        if self._may_lack_keys:
            top.masked_fill_(top == -torch.inf, 0)
        weights = scores.sub_(top).exp_()
        total = weights.sum((0, 3))
        at = 0
        for block in blocks:
            to = at + len(block.key)
            _multiply(weights[at:to], block.value, 1.0, outputs[at:to])
            at = to
        divisor = total.masked_fill(total == 0, 1) if self._may_lack_keys else total
        output = (outputs.sum(0) / divisor.unsqueeze(-1)).view(1, heads, length, -1)
        if len(self.pieces) == 1 and not (query.return_lse or query.sinks is not None or self._may_lack_keys):
            return AttentionResult(output, None, None, CPU_PAGES, suspect)
        lse = (total.log() + top.view(total.shape)).view(1, heads, length)
        return AttentionResult(output, lse if shift is None else lse + shift, None, CPU_PAGES, suspect)

    def _is_sound(self, lse: torch.Tensor) -> bool:
        """Whether each row whose lse [1, Hq, Lq] is infinite lacks keys, rather than having scores that are all beyond
        float32.
        """
        return surely_finite(lse) or bool((lse.isfinite() | lacks_keys(self.query)).all())

    @property
    def _may_lack_keys(self) -> bool:
        """Whether a query may reach no key of some pages."""
        query = self.query
        return query.mask is not None or query.bias is not None or query.query.shape[2] > 1

    def _bias(self, scores: torch.Tensor, first_token: int) -> torch.Tensor | None:
        """Adds biases to scores [n, Hq, Lq, P] of the pages from a token on, and -inf where keys are excluded.

        Returns the term that the lse then lacks, [1, Hq, Lq], if any.
        """
        query, band = self.query, self.band
        count, _, length, per_page = scores.shape
        tokens = range(first_token, first_token + count * per_page)
        within = range(max(self.begin, tokens.start), min(self.end, tokens.stop))

        def pages(parameter: torch.Tensor) -> torch.Tensor:
            """A tensor [1, heads, Lq, keys] for the keys `within`, laid out like the scores."""
            if parameter.shape[-1] == 1:
                return parameter
            whole = pad(parameter, (within.start - tokens.start, tokens.stop - within.stop))
            return whole.view(*whole.shape[1:3], count, per_page).permute(2, 0, 1, 3)

        def own(parameter: torch.Tensor) -> torch.Tensor:
            """The part of a tensor for all keys that is for the keys `within`."""
            return part_of(parameter, 3, within.start, within.stop)

        shift = None
        if query.bias is not None:
            scores += pages(own(query.bias))
        if query.alibi_slopes is not None:
            slopes, shift = alibi(query.alibi_slopes, self._narrowed(within))
            scores += pages(slopes)
        if query.mask is not None:
            scores.masked_fill_(pages(~own(query.mask)), -torch.inf)
        if not (band.begin(length - 1) <= within.start and band.end(0) >= within.stop):
            scores.masked_fill_(pages(~self._narrowed(within).tensor(scores.device)[None, None]), -torch.inf)
        if within.start > tokens.start:
            scores[0, ..., : within.start - tokens.start] = -torch.inf
        if within.stop < tokens.stop:
            scores[-1, ..., within.stop - tokens.stop :] = -torch.inf
        return shift

    def _narrowed(self, within: range) -> Band:
        """The band over some of the keys."""
        band = self.band
        return Band(band.query_length, len(within), band.offset - within.start, band.left, band.right)


def _multiply(left: torch.Tensor, right: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`scale * left @ right`: left [n, Hk, R, X] and right [n, Hk, X, Y] to out [n, Hk, R, Y], which is packed."""
    if right.dtype != left.dtype:
        step = max(1, CONVERTED_BYTES // (right[0].numel() * left.dtype.itemsize))
        for start in range(0, len(right), step):
            stop = start + step
            _multiply(left[start:stop], right[start:stop].to(left.dtype), scale, out[start:stop])
        return
    count, heads, rows, _ = left.shape
    if count == 1 or right.stride(0) == heads * right.stride(1):
        together = (tensor.reshape(count * heads, *tensor.shape[2:]) for tensor in (left, right))
        out.view(count * heads, rows, -1).baddbmm_(*together, beta=0, alpha=scale)
    else:
        for head in range(heads):
            own = out.new_empty(count, rows, out.shape[3])
            out[:, head] = own.baddbmm_(left[:, head].contiguous(), right[:, head], beta=0, alpha=scale)
