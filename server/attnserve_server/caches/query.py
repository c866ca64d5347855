"""One query over a cache: which kernel calls it takes, and how their results are combined into its own.

In: a query and the pages it attends to; results of calls. Out: calls; one result. Results over disjoint keys are merged
by their log-sum-exps, in the order of the keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch.nn.functional import pad

from attnserve_server.caches.merge import merge
from attnserve_server.caches.page_memory import STORAGE
from attnserve_server.caches.pages import Block, PagePool
from attnserve_server.caches.parts import Part, as_sequences, by_page
from attnserve_server.caches.shape import CacheShape
from attnserve_server.kernels import AdditiveScore, AttentionCall, AttentionResult, GeneralScore, part_of, widened
from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import add_sinks
from attnserve_server.kernels.finite import surely_finite
from attnserve_server.kernels.written_out import stay_in_float32
from attnserve_server.requests.options import ScoreStage
from attnserve_server.requests.scores import is_fusable, needs_float64

FEW_QUERIES: Final = 16
"""With more queries than this, it pays to copy keys and values into one piece: longer sequences make kernels faster."""
PIECE_BYTES = 1 << 25
"""The most bytes of keys and values in such a copy; longer sequences are copied piece by piece."""


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """query [1, Hq, Lq, D] over the first `length` tokens that `pages` hold, in the dtype of `shape` or another.

    The options are those of `AttentionCall`; positions are counted from the first token of the cache, and masks and
    biases broadcast to [1, Hq, Lq, length]. Keys from `kv_length` on are excluded; None excludes none.
    """

    query: torch.Tensor
    shape: CacheShape
    pages: Sequence[int]
    length: int
    scale: float
    score: GeneralScore | AdditiveScore | None = None
    softcap: float = 0.0
    offset: int = 0
    window: tuple[int, int] = (-1, -1)
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    return_lse: bool = False
    return_scores: ScoreStage | None = None
    kv_length: int | None = None

    @property
    def keys(self) -> int:
        """How many keys there are, before masks."""
        return self.length if self.kv_length is None else self.kv_length

    @property
    def band(self) -> Band:
        """Which keys the queries reach by their positions."""
        return Band(self.query.shape[2], self.keys, self.offset, *self.window)


class Job(NamedTuple):
    """A call, the page that it begins with, and the term that the lse of each of its sequences then lacks."""

    call: AttentionCall
    first_page: int
    lacking: torch.Tensor | None = None

    def completed(self, result: AttentionResult) -> AttentionResult:
        """The result of the call, with the term that its lse lacks added."""
        if self.lacking is not None and result.lse is not None:
            result.lse = result.lse + self.lacking
        return result


@dataclass(slots=True)
class QueryAttention:
    """A query, the groups of parts to compute for it, and their results, which are merged group by group."""

    query: CacheQuery
    tensor: torch.Tensor
    """The query in the dtype of computation."""
    keys: int
    """How many keys have scores."""
    per_page: int
    groups: list[list[Part]]
    finite: bool
    """Whether the query is known to hold neither NaN nor infinities."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    lses: list[torch.Tensor] = field(default_factory=list)
    scores: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Scores of parts, and the lse of each."""
    kernel: str = "none"
    reported: bool = False
    """Whether a kernel is known to have reported that inputs or results were not finite."""

    @staticmethod
    def of(query: CacheQuery, pool: PagePool, device: torch.device, by_page_too: bool) -> QueryAttention:
        """Plans the computation; `by_page_too` allows parts that are computed page by page."""
        dtype = torch.promote_types(query.query.dtype, STORAGE[query.shape.dtype])
        if device.type == "cpu":
            # Half precision is no faster here, and this way partial results are not rounded before they are merged.
            dtype = torch.promote_types(dtype, torch.float32)
        if needs_float64(query):
            dtype = torch.float64  # lses that are infinite cannot be merged
        # Scores before masking exist for keys that `kv_length` excludes, too.
        keys = query.length if query.return_scores in ("raw", "capped") else query.keys
        per_page, shape = pool.tokens_per_page(query.shape), query.shape
        band = query.band
        reach = (0, keys) if query.return_scores is not None else band.reach()
        if by_page_too and has_few_queries(query, per_page):
            groups = [by_page(band, reach, per_page)]
            if query.alibi_slopes is not None and any(p.by_page and query.offset < p.end - 1 for p in groups[0]):
                groups = []
        else:
            groups = []
        if not groups:
            token_bytes = shape.num_kv_heads * (shape.head_dim + shape.value_dim) * dtype.itemsize
            pages = max(1, PIECE_BYTES // (token_bytes * per_page))
            groups = [[part] for part in as_sequences(reach, per_page, pages)]
        tensor = query.query if query.query.dtype == dtype else query.query.to(dtype)
        finite = device.type == "cpu" and surely_finite(tensor)  # looking on another device would mean waiting for it
        attention = QueryAttention(query, tensor, keys, per_page, groups, finite)
        # Parts are merged by their lses, which in float32 lack digits where they are large.
        several = sum(map(len, groups)) > 1
        return attention.in_float64() if several and device.type == "cpu" and _may_have_large_lse(query) else attention

    def in_float64(self) -> QueryAttention:
        """The same query in float64, with nothing computed yet."""
        query = self.query
        added = {name: getattr(query, name) for name in ("bias", "alibi_slopes", "sinks")}
        query = replace(query, **{name: part.double() for name, part in added.items() if part is not None})
        return QueryAttention(query, query.query.double(), self.keys, self.per_page, self.groups, self.finite)

    @property
    def shares_with(self) -> Hashable:
        """Equal for queries that can share a call over pages that each reaches in full; None if it shares with none."""
        query = self.query
        if query.mask is not None or query.bias is not None or query.alibi_slopes is not None:
            return None
        return query.shape, self.tensor.dtype, self.tensor.shape[1], query.scale

    def flops(self, part: Part) -> int:
        """What a part costs."""
        _, heads, length, width = self.tensor.shape
        return 2 * heads * length * (part.end - part.begin) * (width + self.query.shape.value_dim)

    def bytes(self, group: list[Part]) -> int:
        """How much the copies and partial results of a group take."""
        query, dtype = self.query, self.tensor.dtype
        shape, (_, heads, length, _) = query.shape, query.query.shape
        copied = sum(part.end - part.begin for part in group if not part.by_page)
        partial = sum((part.end - part.begin) // self.per_page if part.by_page else 1 for part in group)
        width = shape.head_dim + shape.value_dim
        return (copied * shape.num_kv_heads * width + partial * heads * length * shape.value_dim) * dtype.itemsize

    def jobs(self, part: Part, pool: PagePool) -> Iterator[Job]:
        """The calls of a part."""
        query = self.query
        pages = query.pages[part.begin // self.per_page : -(-part.end // self.per_page)]
        tokens = part.end - part.begin
        if part.by_page:
            for block in pool.blocks(query.shape, pages, tokens):
                yield self._job_by_page(block, part.begin + block.first_token)
            return
        block = pool.gather(query.shape, pages, tokens, self.tensor.dtype)
        mask, bias = (part_of(parameter, 3, part.begin, part.end) for parameter in (query.mask, query.bias))
        if query.kv_length is not None and query.kv_length < self.keys:
            within = torch.arange(part.begin, part.end, device=self.tensor.device).view(1, 1, 1, -1) < query.kv_length
            mask = within if mask is None else mask & within
        call = AttentionCall(
            self.tensor,
            block.key,
            block.value,
            query.scale,
            score=query.score,
            softcap=query.softcap,
            offset=query.offset - part.begin,
            window=query.window,
            mask=mask,
            bias=bias,
            alibi_slopes=query.alibi_slopes,
            return_lse=True,
            finite=block.finite and self.finite,
            return_scores=query.return_scores,
        )
        yield Job(call, block.first_page)

    def _job_by_page(self, block: Block, first: int) -> Job:
        """The call for full pages, from token `first` on, that every query reaches in full."""
        query, count, per_page = self.query, len(block.key), self.per_page
        lacking = None
        if query.alibi_slopes is not None:
            # Each page is computed as if the queries began at its last key. How much further away they are adds the
            # same term to the scores of all its keys, which the lse then lacks.
            pages = torch.arange(count, device=self.tensor.device, dtype=query.alibi_slopes.dtype)
            further = (query.offset - first - per_page + 1) - pages * per_page
            lacking = -query.alibi_slopes[None, :, None] * further[:, None, None]
        call = AttentionCall(
            self.tensor.expand(count, -1, -1, -1),
            block.key,
            block.value,
            query.scale,
            offset=per_page - 1,
            mask=_pages(query.mask, first, count, per_page),
            bias=_pages(query.bias, first, count, per_page),
            alibi_slopes=query.alibi_slopes,
            return_lse=True,
            finite=block.finite and self.finite,
        )
        return Job(call, block.first_page, lacking)

    def take(self, results: Sequence[AttentionResult]) -> None:
        """Merges the results of a group, from its own calls and its rows of shared ones, into the result so far."""
        self.kernel = results[0].kernel
        for result in results:
            assert result.lse is not None
            self.outputs.append(result.output)
            self.lses.append(result.lse)
            if result.suspect is not None and result.suspect.device.type == "cpu":
                self.reported |= bool(result.suspect.any())
            if result.scores is not None:
                self.scores.append((result.scores, result.lse))
        if len(self.outputs) > 1 or len(self.outputs[0]) > 1:
            output, lse = merge(self.outputs, self.lses, self.needs_lse)
            self.outputs, self.lses = [output], [lse]

    @property
    def needs_lse(self) -> bool:
        """Whether a merged lse is needed: to be returned or used, or to tell which rows have nothing to attend."""
        query = self.query
        if query.return_lse or query.sinks is not None or query.return_scores is not None or len(self.groups) > 1:
            return True
        # Only over whole pages without a mask or bias is every row certain to attend to something.
        return query.mask is not None or query.bias is not None or not any(part.by_page for part in self.groups[0])

    @property
    def is_suspect(self) -> bool:
        """Whether a row that has keys may have scores beyond the range of float32, once all groups have been taken. NaN
        and infinities in inputs look the same. On another device than a CPU, only what a kernel reported counts:
        looking would mean waiting.
        """
        query, output, lse = self.query, self.outputs[0], self.lses[0]
        if output.device.type != "cpu":
            return self.reported
        if not surely_finite(output):
            return True
        return self.needs_lse and not surely_finite(lse) and not bool((lse.isfinite() | lacks_keys(query)).all())

    def stays_in_float32(self, pool: PagePool) -> bool:
        """Whether no score can have left the range of float32."""
        query = self.query
        if self.tensor.dtype == torch.float64:
            return True
        if query.score is not None or query.bias is not None or query.alibi_slopes is not None:
            return False
        first, end = self.groups[0][0].begin // self.per_page, self.groups[-1][-1].end
        pages = query.pages[first : -(-end // self.per_page)]
        blocks = pool.blocks(query.shape, pages, end - first * self.per_page)
        return all(stay_in_float32(self.tensor, block.key, query.scale) for block in blocks)

    def result(self) -> AttentionResult:
        """The result, when all groups have been taken."""
        query, (output,), (lse,) = self.query, self.outputs, self.lses
        if query.sinks is not None:
            output, lse = add_sinks(output, lse, query.sinks[None, :, None])
        scores = None
        if query.return_scores is not None:
            parts = [part for part, _ in self.scores]
            if query.return_scores == "weights":
                # What is excluded stays 0 also where a row attends to a NaN, or to nothing, and has no share.
                shares = [torch.exp(own - lse).unsqueeze(-1) for _, own in self.scores]
                parts = [(part * share).masked_fill(part == 0, 0) for part, share in zip(parts, shares, strict=True)]
            scores = widened(torch.cat(parts, 3), query.length, query.return_scores).to(query.query.dtype)
        lse = lse if query.query.dtype == torch.float64 else lse.float()
        return AttentionResult(output.to(query.query.dtype), lse if query.return_lse else None, scores, self.kernel)


def lacks_keys(query: CacheQuery) -> torch.Tensor:
    """Which rows reach no key, by the mask and their positions: bool, broadcasts to [1, Hq, Lq]. Contents of keys do
    not decide it: pages also hold what others have left there.
    """
    band = query.band
    begin, end = band.edges(query.query.device)
    mask = part_of(query.mask, 3, 0, query.keys)
    if mask is None:
        return begin == end
    if mask.shape[3] == 1:
        return (begin == end) | ~mask.squeeze(3)
    before = pad(mask.cumsum(3, dtype=torch.int32), (1, 0))  # how many keys before each are not masked
    before = before.expand(-1, -1, band.query_length, -1)
    first, behind = (edge.view(1, 1, -1, 1).expand(1, before.shape[1], -1, 1) for edge in (begin, end))
    return (before.gather(3, first) == before.gather(3, behind)).squeeze(3)


def _may_have_large_lse(query: CacheQuery) -> bool:
    """Whether biases, or those of ALiBi, may be large for all keys that matter."""
    if query.alibi_slopes is None:
        return query.bias is not None
    hides = query.mask is not None or query.bias is not None
    return hides or bool((query.alibi_slopes < 0).any())


def has_few_queries(query: CacheQuery, per_page: int) -> bool:
    """Whether pages can be computed one by one, without a copy: for few queries without rare options."""
    _, heads, length, _ = query.query.shape
    if not is_fusable(query) or (query.alibi_slopes is not None and (query.mask is not None or query.bias is not None)):
        return False
    # Partial results must be no larger than the pages that they are computed from.
    shape = query.shape
    page = shape.num_kv_heads * per_page * (shape.head_dim + shape.value_dim)
    return 0 < length <= FEW_QUERIES and heads * length * shape.value_dim <= page


def _pages(parameter: torch.Tensor | None, first: int, count: int, per_page: int) -> torch.Tensor | None:
    """A mask or bias [1, Hq, Lq, S] for pages from token `first` on as one for a stack [count, Hq, Lq, P]."""
    parameter = part_of(parameter, 3, first, first + count * per_page)
    if parameter is None or parameter.shape[-1] == 1:
        return parameter
    return parameter.view(*parameter.shape[1:3], count, per_page).permute(2, 0, 1, 3)
