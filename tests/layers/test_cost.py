"""What requests to layers cost, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import random_layers as make

from attnserve_server.layers.cost import cost_of, resident_cost
from attnserve_server.layers.specification import Attention, FeedForward, LearnedScore, Transformer
from attnserve_server.requests.problem import ADDITIVE, PAIR_COST, WRITTEN_OUT, WRITTEN_OUT_PAIR_COST

LENGTHS, CONTEXTS = [3, 5], [4, 7]
ROWS, KEYS, PAIRS, OWN_PAIRS = 8, 11, 3 * 4 + 5 * 7, 3 * 3 + 5 * 5
WIDTH, HEADS, HIDDEN = 256, 4, 48
HEAD = WIDTH // HEADS
PROJECTION = 2 * WIDTH * WIDTH
"""The operations of one row, key or value."""
PAIR = 2 * HEADS * 2 * HEAD

ATTENTION = make.attention(WIDTH, HEADS)


@pytest.mark.parametrize("gated", [False, True])
def test_blocks_have_their_attentions_and_their_products(gated: bool) -> None:
    feed_forward = FeedForward(width=WIDTH, hidden=HIDDEN, activation="gelu", gated=gated)
    products = 2 * WIDTH * HIDDEN * (3 if gated else 2)
    encoder = Transformer(blocks=3, block=make.block(WIDTH, HEADS, feed_forward=feed_forward))
    each = ROWS * (4 * PROJECTION + products) + OWN_PAIRS * PAIR
    assert cost_of(encoder, LENGTHS, None) == (3 * each, 3 * each)
    decoder = Transformer(blocks=2, block=make.block(WIDTH, HEADS, crossed=True, feed_forward=feed_forward))
    crossed = ROWS * 2 * PROJECTION + KEYS * 2 * PROJECTION + PAIRS * PAIR
    assert cost_of(decoder, LENGTHS, CONTEXTS) == (2 * (each + crossed), 2 * (each + crossed))


@pytest.mark.parametrize("value", [False, True])
def test_learned_scores_count_for_more_than_their_operations(value: bool) -> None:
    """But only those of pairs: projections are products of matrices."""
    outputs = 300 if value else 100
    additive = LearnedScore(score="additive", inputs=200, contexts=100, outputs=outputs, units=50, value=value)
    values = KEYS * 2 * 100 * outputs if value else 0
    projections, pairs = 2 * 50 * (ROWS * 200 + KEYS * 100) + values, PAIRS * 2 * (2 * 50 + outputs)
    assert cost_of(additive, LENGTHS, CONTEXTS) == (projections + pairs, projections + ADDITIVE * pairs)
    general = replace(additive, score="general", units=0)
    projections, pairs = 2 * ROWS * 200 * 100 + values, PAIRS * 2 * (100 + outputs)
    assert cost_of(general, LENGTHS, CONTEXTS) == (
        projections + pairs,
        projections + max(WRITTEN_OUT * pairs, WRITTEN_OUT_PAIR_COST * PAIRS),
    )


@pytest.mark.parametrize(
    ("fields", "asked", "weight"),
    [
        ({}, {}, 1),
        ({}, {"hides": True}, 1),
        ({}, {"scores": True}, WRITTEN_OUT),
        ({"softcap": 5.0}, {}, WRITTEN_OUT),
        ({"alibi": (0.5,) * HEADS}, {}, 1),
        ({"alibi": (0.5,) * HEADS}, {"hides": True}, WRITTEN_OUT),
    ],
    ids=["plain", "masked", "scores", "softcap", "alibi", "masked alibi"],
)
def test_pairs_count_for_more_where_attention_is_written_out(
    fields: dict[str, Any], asked: dict[str, bool], weight: int
) -> None:
    layer = replace(ATTENTION, **fields)
    cost = cost_of(layer, LENGTHS, CONTEXTS, **asked)
    assert cost.flops == cost_of(ATTENTION, LENGTHS, CONTEXTS).flops
    assert cost.weighed - cost.flops == (weight - 1) * PAIRS * PAIR
    stack = Transformer(blocks=3, block=make.block(WIDTH, HEADS, self_attention=layer))
    cost = cost_of(stack, LENGTHS, None, **asked)
    assert cost.weighed - cost.flops == 3 * (weight - 1) * OWN_PAIRS * PAIR
    if "scores" not in asked:  # decoders return none
        cost = resident_cost(stack, [2, 1], [10, 30], **asked)
        assert cost == (3 * (2 * 10 + 30) * PAIR, 3 * weight * (2 * 10 + 30) * PAIR)


@pytest.mark.parametrize(("softcap", "least"), [(0.0, PAIR_COST), (1.0, WRITTEN_OUT_PAIR_COST)])
def test_pairs_of_narrow_heads_cost_what_they_take(softcap: float, least: int) -> None:
    def weighed(layer: Attention) -> int:
        return cost_of(layer, [100], None).weighed - cost_of(layer, [100], None).flops

    narrow = replace(make.attention(WIDTH, WIDTH), softcap=softcap)
    assert weighed(narrow) == WIDTH * 100 * 100 * (least - 2 * 2)
    stack = Transformer(blocks=2, block=make.block(WIDTH, WIDTH, self_attention=narrow))
    assert resident_cost(stack, [1], [100]).weighed == 2 * WIDTH * 100 * least


def test_resident_keys_beyond_a_window_cost_nothing() -> None:
    stack = Transformer(blocks=2, block=make.block(self_attention=make.attention(causal=True, window=(9, 0))))
    costs = [resident_cost(stack, [3], [resident]).flops for resident in (1, 8, 9, 10, 10**6)]
    assert [cost / costs[0] for cost in costs] == [1, 8, 9, 9, 9]
    itself = Transformer(blocks=2, block=make.block(self_attention=make.attention(causal=True, window=(0, 0))))
    assert resident_cost(itself, [3], [10]) == (0, 0)
