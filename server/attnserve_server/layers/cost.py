"""The cost of a layer in floating-point operations, from a specification and lengths alone, without torch.

A multiplication and an addition count as two. Norms, activations and the like, which are small beside the matrix
products, are not counted, and nothing is deducted for what masks exclude.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnserve_server.layers.specification import Architecture, Attention, FeedForward, LearnedScore


def flops(architecture: Architecture, lengths: Sequence[int], context_lengths: Sequence[int] | None) -> int:
    """The operations of one request; `context_lengths` None is self-attention (for decoders, an error elsewhere)."""
    if isinstance(architecture, Attention):
        return _attention(architecture, lengths, lengths if context_lengths is None else context_lengths)
    if isinstance(architecture, LearnedScore):
        return _learned_score(architecture, lengths, lengths if context_lengths is None else context_lengths)
    block = architecture.block
    each = _attention(block.self_attention, lengths, lengths) + sum(lengths) * _feed_forward(block.feed_forward)
    if block.cross_attention is not None:
        each += _attention(block.cross_attention, lengths, context_lengths or ())
    return architecture.blocks * each


def _attention(attention: Attention, lengths: Sequence[int], context_lengths: Sequence[int]) -> int:
    heads, kv_heads, width, value_width = attention.heads, attention.kv_heads, attention.head_dim, attention.value_dim
    per_row = attention.inputs * heads * width
    if attention.output:
        per_row += attention.outputs * heads * value_width
    per_key = attention.contexts * kv_heads * (width + value_width)
    per_pair = heads * (width + value_width)
    return 2 * (sum(lengths) * per_row + sum(context_lengths) * per_key + _pairs(lengths, context_lengths) * per_pair)


def _learned_score(attention: LearnedScore, lengths: Sequence[int], context_lengths: Sequence[int]) -> int:
    per_key = attention.contexts * attention.outputs if attention.value else 0
    if attention.score == "additive":
        per_row, per_pair = attention.inputs * attention.units, 2 * attention.units + attention.outputs
        per_key += attention.contexts * attention.units
    else:
        per_row, per_pair = attention.inputs * attention.contexts, attention.contexts + attention.outputs
    return 2 * (sum(lengths) * per_row + sum(context_lengths) * per_key + _pairs(lengths, context_lengths) * per_pair)


def _feed_forward(feed_forward: FeedForward) -> int:
    """The operations for one row."""
    return 2 * feed_forward.width * feed_forward.hidden * (3 if feed_forward.gated else 2)


def _pairs(lengths: Sequence[int], context_lengths: Sequence[int]) -> int:
    return sum(length * context_length for length, context_length in zip(lengths, context_lengths, strict=False))
