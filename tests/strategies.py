"""Hypothesis strategies: random combinations of everything that is legal in a request."""

from __future__ import annotations

from cases import DTYPES, Plan
from hypothesis import settings
from hypothesis import strategies as st

MANY = settings(max_examples=settings().max_examples * 8)
"""For tests whose examples are cheap and whose space is large."""

SEEDS = st.integers(0, 2**32 - 1)
"""Seeds of contents."""


@st.composite
def plans(draw: st.DrawFn, dense: bool = False) -> Plan:
    """Any legal request, small: every layout, rank, dtype and option, zero lengths and single elements included.

    Dense ones are as the kernels take them: of rank 4, heads first, no lengths, one offset.
    """
    layout = "heads_first" if dense else draw(_LAYOUTS)
    rank = {"packed": 3}.get(layout) or (4 if dense else draw(_RANKS))
    key_heads, group = (1, 1) if rank == 2 else (draw(_KEY_HEADS), draw(_GROUPS))
    heads = key_heads * group
    query_length, key_length = draw(_LENGTHS), draw(_LENGTHS)
    batch = 1 if rank < 4 and layout != "packed" else draw(_BATCHES)
    query_lengths = kv_lengths = None

    def one_each(integers: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(integers, min_size=batch, max_size=batch).map(tuple)

    if layout == "packed":
        query_lengths, kv_lengths = draw(one_each(_LENGTHS)), draw(one_each(_LENGTHS))
        query_length, key_length = max(query_lengths), max(kv_lengths)
    elif not dense and draw(_EITHER):
        kv_lengths = draw(one_each(st.integers(0, key_length)))
    grid = (batch, heads, query_length, key_length)
    offsets = st.integers(-key_length - 2, key_length + 2)
    score = draw(_SCORES)
    head_dim = draw(_WIDTHS)
    return Plan(
        dtype=draw(_DTYPES),
        layout=layout,
        rank=rank,
        batch=batch,
        key_heads=key_heads,
        group=group,
        query_length=query_length,
        key_length=key_length,
        head_dim=head_dim,
        key_dim=head_dim if score == "dot" else draw(_WIDTHS),
        value_dim=draw(st.one_of(st.just(head_dim), _WIDTHS)),
        query_lengths=query_lengths,
        kv_lengths=kv_lengths,
        causal=draw(_CAUSAL),
        query_offset=draw(st.one_of(st.none(), offsets, *([] if dense else [one_each(offsets)]))),
        window=draw(_WINDOWS),
        mask_shape=draw(st.one_of(st.none(), _broadcastable(grid))),
        bias_shape=draw(st.one_of(st.none(), _broadcastable(grid))),
        alibi=draw(_EITHER),
        sinks=draw(_EITHER),
        scale=draw(_SCALES),
        softcap=draw(_SOFTCAPS),
        score=score,
        hidden=draw(_HIDDEN),
        additive_parts=draw(_PAIRS),
        parameter_dtype=draw(_DTYPES),
        poisoned=draw(_EITHER),
    )


# Made once: one that is made for each example is also examined for each, a quarter of the time to draw it.
_EITHER = st.booleans()
_PAIRS = st.tuples(_EITHER, _EITHER)
_LAYOUTS = st.sampled_from(["heads_first", "length_first", "packed"])
_RANKS = st.sampled_from([4, 3, 2])
_BATCHES = st.integers(1, 4)
_KEY_HEADS = st.integers(1, 3)
_GROUPS = st.sampled_from([1, 1, 2, 3])
_DTYPES = st.sampled_from(sorted(DTYPES))
_SCORES = st.sampled_from(["dot", "dot", "dot", "general", "additive"])
_HIDDEN = st.integers(1, 6)
_CAUSAL = st.sampled_from([False, True, "top_left", "bottom_right"])
_WINDOWS = st.one_of(st.none(), st.tuples(st.integers(-1, 5), st.integers(-1, 5)))
_SCALES = st.one_of(st.none(), st.sampled_from([0.0, -0.5, 0.25, 1.0]))
_SOFTCAPS = st.sampled_from([0.0, 0.0, 0.5, 5.0])
_LENGTHS = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 1, 16, 17, 40]))
_WIDTHS = st.one_of(st.integers(1, 20), st.sampled_from([1, 16, 32, 64]))


@st.composite
def _broadcastable(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to another: leading axes dropped, any axes 1."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.booleans()) else n for n in kept)
