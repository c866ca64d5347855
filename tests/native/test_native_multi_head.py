"""Multi-head layers by the native library in one call: their results, and what a sequence's bits may depend on."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from binding import DTYPES, each_instructions
from bits import assert_same_bits
from hypothesis import given, settings
from random_calls import randoms
from random_multi_heads import random_multi_head

from attnserve_server.native.library import Team, Threads
from attnserve_server.native.multi_head import MultiHeads


@each_instructions
@settings(max_examples=60)
@given(random=randoms)
def test_it_is_the_layer(instructions: str, random: Random) -> None:
    each = random_multi_head(random)
    each.assert_right(each.outcome(MultiHeads(instructions)))


@each_instructions
@settings(max_examples=30)
@given(random=randoms)
def test_batches_and_helpers_change_nothing(instructions: str, random: Random) -> None:
    layers, each = MultiHeads(instructions), random_multi_head(random, (5, 1, 130, 64, 16))
    team = Team(3, patient=True)
    try:
        together, _ = each.outcome(layers, Threads(team, random.randint(1, 3)))
    finally:
        team.close()
    sequences, expected = each.sequences, each.expected
    for place, found in enumerate(together):
        each.sequences, each.expected = [sequences[place]], [expected[place]]
        ((alone,), _) = each.outcome(layers)
        assert_same_bits(found, alone)
    each.sequences, each.expected = sequences, expected
    each.assert_right((together, []))


@each_instructions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_told(instructions: str, dtype: np.dtype[Any]) -> None:
    """Only for the sequence that has it; the others keep their results."""
    layers, each = MultiHeads(instructions), random_multi_head(Random(2), (3, 20, 1, 7), dtype=dtype)
    before, _ = each.outcome(layers)
    for value in (np.nan, np.inf):
        each.sequences[1][4, 0] = value
        after, broken = each.outcome(layers)
        assert broken == [1]
        for place in (0, 2, 3):
            assert_same_bits(after[place], before[place])
