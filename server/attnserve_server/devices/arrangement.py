"""Where the rows of packed sequences are, token by token, from where each sequence begins and its strides.

In: a table of sequences, on any device. Out: indexes, on that device. Nothing is waited for.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch

Number = TypeVar("Number", int, torch.Tensor)


class PackedSequence(NamedTuple, Generic[Number]):
    """A sequence of the pack's request `member`, and which rows of all payloads it consists of.

    Its token t in head h is the row `start + t * token + h * head`. The keys are those within reach of its queries.
    Fields are integers for one sequence, tensors [N] for many.
    """

    member: Number
    query_start: Number
    query_token: Number
    query_head: Number
    query_length: Number
    kv_start: Number
    kv_token: Number
    kv_head: Number
    kv_length: Number
    lse_start: Number
    lse_head: Number


class Arrangement(NamedTuple):
    """For T queries and U keys in the kernel's order, tokens first and sequences end to end:

    `query_rows` [T, Hq], `kv_rows` [U, Hk] and `lse_rows` [T, Hq]: rows of payloads, and of the lse; `query_starts` and
    `kv_starts`, int32 [N + 1]: where sequences begin; `query_sequence` [T]; and the pack's requests to which tokens
    belong, `query_member` [T] and `kv_member` [U].
    """

    query_rows: torch.Tensor
    kv_rows: torch.Tensor
    lse_rows: torch.Tensor
    query_starts: torch.Tensor
    kv_starts: torch.Tensor
    query_sequence: torch.Tensor
    query_member: torch.Tensor
    kv_member: torch.Tensor

    @staticmethod
    def of(
        columns: PackedSequence[torch.Tensor], queries: int, keys: int, query_heads: int, kv_heads: int
    ) -> Arrangement:
        """That of sequences with so many tokens in all."""
        query, key = _Tokens.of(columns.query_length, queries), _Tokens.of(columns.kv_length, keys)
        return Arrangement(
            query.rows(columns.query_start, columns.query_token, columns.query_head, query_heads),
            key.rows(columns.kv_start, columns.kv_token, columns.kv_head, kv_heads),
            query.rows(columns.lse_start, torch.ones_like(columns.lse_start), columns.lse_head, query_heads),
            query.starts,
            key.starts,
            query.sequence,
            columns.member[query.sequence],
            columns.member[key.sequence],
        )


class _Tokens(NamedTuple):
    """Packed tokens: where each sequence begins, int32 [N + 1]; the sequence of each token [T], and its place there."""

    starts: torch.Tensor
    sequence: torch.Tensor
    place: torch.Tensor

    @staticmethod
    def of(lengths: torch.Tensor, total: int) -> _Tokens:
        """The tokens of sequences of these lengths [N]; given their sum `total`, torch need not wait for it."""
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        sequence = torch.repeat_interleave(lengths, output_size=total)
        place = torch.arange(total, device=lengths.device) - starts[sequence]
        return _Tokens(starts.to(torch.int32), sequence, place)

    def rows(self, start: torch.Tensor, token: torch.Tensor, head: torch.Tensor, heads: int) -> torch.Tensor:
        """The row [T, heads] of each token in each head, given each sequence's strides [N]."""
        first = start[self.sequence] + self.place * token[self.sequence]
        across = torch.arange(heads, device=start.device) * head[self.sequence].unsqueeze(1)
        return first.unsqueeze(1) + across
