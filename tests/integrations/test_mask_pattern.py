"""The pattern of a mask is equivalent to the mask, and is found wherever there is one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnserve.integrations._mask_pattern import MaskPattern, recognise


def meaning(pattern: MaskPattern, batch: int, query_length: int, kv_length: int) -> torch.Tensor:
    """The mask `[B, 1, Lq, S]` that a pattern stands for, pair by pair as the contract of a request defines it."""
    mask = torch.empty(batch, 1, query_length, kv_length, dtype=torch.bool)
    left, right = pattern.window or (-1, -1)
    for b in range(batch):
        for i in range(query_length):
            for j in range(kv_length):
                position = pattern.query_offset + i
                mask[b, 0, i, j] = (
                    (not pattern.causal or j <= position)
                    and (left < 0 or position - left <= j)
                    and (right < 0 or j <= position + right)
                    and (pattern.kv_lengths is None or j < pattern.kv_lengths[b])
                    and (pattern.keys is None or bool(pattern.keys[b % pattern.keys.shape[0], 0, 0, j]))
                )
    return mask


@st.composite
def patterns(draw: st.DrawFn) -> tuple[MaskPattern, int, int, int, int]:
    """A pattern, then the batch, query length, key length and local size to go with it."""
    batch, query_length, kv_length = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 7))
    size = draw(st.integers(1, 6))
    causal = draw(st.booleans())
    window = draw(st.sampled_from([None, (size - 1, -1) if causal else (size, size)]))
    choice = draw(st.sampled_from(["all", "lengths", "keys"]))
    lengths = draw(st.lists(st.integers(0, kv_length), min_size=batch, max_size=batch))
    keys = draw(st.lists(st.booleans(), min_size=batch * kv_length, max_size=batch * kv_length))
    pattern = MaskPattern(
        causal=causal,
        window=window,
        query_offset=draw(st.integers(-2, 4)),
        kv_lengths=torch.tensor(lengths) if choice == "lengths" else None,
        keys=torch.tensor(keys).reshape(batch, 1, 1, kv_length) if choice == "keys" else None,
    )
    return pattern, batch, query_length, kv_length, size


@given(patterns())
def test_every_pattern_is_found(drawn: tuple[MaskPattern, int, int, int, int]) -> None:
    pattern, batch, query_length, kv_length, size = drawn
    mask = meaning(pattern, batch, query_length, kv_length)
    found = recognise(mask, pattern.query_offset, size)
    assert found is not None
    assert torch.equal(meaning(found, batch, query_length, kv_length), mask)
    if pattern.keys is None:
        assert found.keys is None  # a prefix is a length, not a mask


@given(
    st.integers(1, 3).flatmap(
        lambda batch: st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=batch, max_size=batch)
    ),
    st.integers(-2, 3),
    st.none() | st.integers(1, 4),
)
def test_what_is_found_means_the_mask(rows: list[list[bool]], offset: int, size: int | None) -> None:
    mask = torch.tensor(rows).reshape(len(rows), 1, 3, 4)
    found = recognise(mask, offset, size)
    if found is not None:
        assert torch.equal(meaning(found, len(rows), 3, 4), mask)


def test_a_mask_without_a_pattern() -> None:
    mask = torch.tensor([[[[True, False, True], [False, True, True], [True, True, False]]]])
    assert recognise(mask, 0, None) is None
    assert recognise(mask, 0, 2) is None
    assert recognise(torch.ones(1, 2, 3, 3, dtype=torch.bool), 0, None) is None  # differs by head


def test_what_restricts_nothing_is_not_said() -> None:
    last_token = recognise(torch.ones(2, 1, 1, 9, dtype=torch.bool), query_offset=8, local_size=16)
    assert last_token is not None
    assert last_token.options(query_length=1, kv_length=9, resident=False) == {}


def test_no_queries_and_no_keys() -> None:
    for query_length, kv_length in [(0, 3), (3, 0), (0, 0)]:
        found = recognise(torch.ones(2, 1, query_length, kv_length, dtype=torch.bool), 0, None)
        assert found is not None
        assert found.options(query_length, kv_length, resident=False) == {}


def test_an_expanded_batch_is_read_once() -> None:
    """The keys that it chooses are sent once; lengths are those of all its sequences."""
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    found = recognise(causal.expand(4, 1, 5, 5), 0, None)
    assert found is not None
    assert found.options(5, 5, resident=False) == {"causal": True}
    begins_late = recognise((causal & (torch.arange(5) > 1)).expand(4, 1, 5, 5), 0, None)
    assert begins_late is not None
    assert begins_late.keys is not None
    assert begins_late.keys.shape == (1, 1, 1, 5)
    ends_early = recognise((causal & (torch.arange(5) < 3)).expand(4, 1, 5, 5), 0, None)
    assert ends_early is not None
    assert ends_early.kv_lengths is not None
    assert ends_early.kv_lengths.tolist() == [3] * 4


def test_local_attention_to_both_sides() -> None:
    """Its bounds are inclusive."""
    distance = torch.arange(6)[:, None] - torch.arange(6)
    for size in range(1, 5):
        found = recognise((distance.abs() <= size)[None, None], 0, size)
        assert found is not None
        assert found.options(6, 6, resident=False) == {"window": (size, size)}


def test_what_a_window_says_is_not_said_key_by_key() -> None:
    """For a single query, any mask is a choice of keys. Where both say the same with such a choice, no window is."""
    step = recognise((torch.arange(9) > 3)[None, None, None], query_offset=8, local_size=5)
    assert step is not None
    assert step.options(1, 9, resident=True) == {"window": (4, -1), "causal": "bottom_right"}
    padded = recognise((torch.arange(9) > 3)[None, None, None], query_offset=8, local_size=7)
    assert padded is not None
    assert (padded.causal, padded.window, padded.keys is not None) == (False, None, True)


def test_the_last_queries_are_aligned_without_an_offset() -> None:
    pattern = MaskPattern(causal=True, query_offset=3)
    assert pattern.options(query_length=2, kv_length=5, resident=False) == {"causal": "bottom_right"}
    assert pattern.options(query_length=2, kv_length=6, resident=False) == {"causal": True, "query_offset": 3}
    short = MaskPattern(causal=True, query_offset=3, kv_lengths=torch.tensor([4]))
    assert short.options(query_length=2, kv_length=5, resident=False) == {
        "causal": True,
        "query_offset": 3,
        "kv_lengths": short.kv_lengths,
    }


def test_an_offset_of_0_is_said_of_caches() -> None:
    """Their queries are by default the last; those of a request that brings its keys are the first."""
    pattern = MaskPattern(causal=True)
    assert pattern.options(3, 5, resident=False) == {"causal": True}
    assert pattern.options(3, 5, resident=True) == {"causal": True, "query_offset": 0}
    assert pattern.options(5, 5, resident=True) == {"causal": "bottom_right"}
    assert MaskPattern(window=(1, 1)).options(3, 5, resident=True) == {"window": (1, 1), "query_offset": 0}


def test_only_what_is_causal_is_aligned_as_causal() -> None:
    """An alignment is a value of `causal`: queries that see keys on both sides say where they are."""
    pattern = MaskPattern(window=(2, 2), query_offset=3)
    assert pattern.options(2, 5, resident=False) == {"window": (2, 2), "query_offset": 3}


def test_the_keys_that_are_chosen_one_by_one_are_a_mask() -> None:
    keys = torch.tensor([True, False, True])[None, None, None]
    assert MaskPattern(keys=keys).options(1, 3, resident=False) == {"mask": keys}


def test_a_window_of_the_key_at_the_same_place_alone() -> None:
    """A causal window counts that key, one to both sides does not."""
    itself = torch.eye(4, dtype=torch.bool)[None, None]
    for size, causal, window in ((1, True, (0, -1)), (0, False, (0, 0))):
        assert recognise(itself, 0, size) == MaskPattern(causal=causal, window=window)
