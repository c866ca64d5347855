"""What requests to a layer cost, from a specification and lengths alone, without torch.

In: a layer's architecture, and the lengths of sequences. Out: floating-point operations, and as how many operations of
plain attention they count. A multiplication and an addition count as two. Norms, activations and the like, which are
small beside the matrix products, are not counted, and nothing is deducted for what masks exclude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnserve_server.layers.specification import Architecture, Attention, FeedForward, LearnedScore, Transformer
from attnserve_server.requests.problem import ADDITIVE, PAIR_COST, WRITTEN_OUT, WRITTEN_OUT_PAIR_COST


class Cost(NamedTuple):
    """Floating-point operations, and as how many they count: pairs of a query and a key take longer than their
    operations where attention is written out, and in narrow heads.
    """

    flops: int
    weighed: int

    def times(self, count: int) -> Cost:
        """The cost of so many."""
        return Cost(count * self.flops, count * self.weighed)

    def plus(self, flops: int) -> Cost:
        """The cost with further operations, of matrix products."""
        return Cost(self.flops + flops, self.weighed + flops)

    def with_cost(self, other: Cost) -> Cost:
        """The cost of both."""
        return Cost(self.flops + other.flops, self.weighed + other.weighed)


def cost_of(
    architecture: Architecture,
    lengths: Sequence[int],
    context_lengths: Sequence[int] | None,
    *,
    scores: bool = False,
    hides: bool = False,
) -> Cost:
    """The cost of one request; `context_lengths` None is self-attention, which decoders with cross-attention do not
    have alone. `scores` says that some are returned, `hides` that there is a mask or a bias.
    """
    contexts = lengths if context_lengths is None else context_lengths
    if isinstance(architecture, Transformer):
        block = architecture.block
        each = _attention(block.self_attention, lengths, lengths, scores, hides)
        each = each.plus(sum(lengths) * _feed_forward(block.feed_forward))
        if block.cross_attention is not None:  # masks and biases are not for it
            each = each.with_cost(_attention(block.cross_attention, lengths, contexts, scores, False))
        return each.times(architecture.blocks)
    if isinstance(architecture, Attention):
        return _attention(architecture, lengths, contexts, scores, hides)
    return _learned_score(architecture, lengths, contexts)


def resident_cost(
    transformer: Transformer, lengths: Sequence[int], resident_lengths: Sequence[int], *, hides: bool = False
) -> Cost:
    """What sequences cost in addition for continuing so many resident keys each. A window leaves the last of these."""
    attention = transformer.block.self_attention
    left, _ = attention.window
    reached = resident_lengths if left < 0 else [min(keys, left) for keys in resident_lengths]
    return _pairs(attention, _count(lengths, reached), False, hides).times(transformer.blocks)


def _attention(
    attention: Attention, lengths: Sequence[int], context_lengths: Sequence[int], scores: bool, hides: bool
) -> Cost:
    heads, kv_heads, width, value_width = attention.heads, attention.kv_heads, attention.head_dim, attention.value_dim
    per_row = attention.inputs * heads * width
    if attention.output:
        per_row += attention.outputs * heads * value_width
    per_key = attention.contexts * kv_heads * (width + value_width)
    pairs = _pairs(attention, _count(lengths, context_lengths), scores, hides)
    return pairs.plus(2 * (sum(lengths) * per_row + sum(context_lengths) * per_key))


def _pairs(attention: Attention, count: int, scores: bool, hides: bool) -> Cost:
    """The cost of so many pairs of a query and a key."""
    written_out = scores or attention.softcap > 0 or (bool(attention.alibi) and hides)
    weight, least = (WRITTEN_OUT, WRITTEN_OUT_PAIR_COST) if written_out else (1, PAIR_COST)
    return _weighed(count * attention.heads, 2 * (attention.head_dim + attention.value_dim), weight, least)


def _learned_score(attention: LearnedScore, lengths: Sequence[int], context_lengths: Sequence[int]) -> Cost:
    per_key = attention.contexts * attention.outputs if attention.value else 0
    if attention.score == "additive":
        # Of each hidden unit of a pair an addition, a tanh (counted as two) and a multiply-add.
        per_row, score_width, weight = attention.inputs * attention.units, 2 * attention.units, ADDITIVE
        per_key += attention.contexts * attention.units
    else:
        per_row, score_width, weight = attention.inputs * attention.contexts, attention.contexts, WRITTEN_OUT
    count = _count(lengths, context_lengths)
    pairs = _weighed(count, 2 * (score_width + attention.outputs), weight, WRITTEN_OUT_PAIR_COST)
    return pairs.plus(2 * (sum(lengths) * per_row + sum(context_lengths) * per_key))


def _weighed(pairs: int, flops: int, weight: int, least: int) -> Cost:
    """The cost of pairs of a head, each of which takes so many operations that count `weight` times, at `least`."""
    return Cost(pairs * flops, pairs * max(flops * weight, least))


def _feed_forward(feed_forward: FeedForward) -> int:
    """The operations for one row."""
    return 2 * feed_forward.width * feed_forward.hidden * (3 if feed_forward.gated else 2)


def _count(lengths: Sequence[int], context_lengths: Sequence[int]) -> int:
    """How many pairs there are."""
    return sum(length * context_length for length, context_length in zip(lengths, context_lengths, strict=True))
