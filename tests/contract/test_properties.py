"""Properties of attention that the contract promises whatever the numbers, through the real server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import strategies
from bits import assert_same_bits
from cases import Case, Plan
from hypothesis import given
from hypothesis import strategies as st

from attnserve import AttentionResult, Client, merge_attention


@st.composite
def cases(draw: st.DrawFn, /, *, keys: int = 0, **fixed: Any) -> Case:
    """Float32 and float64 cases with at least `keys` keys and the options given in `fixed`."""
    sizes = {
        "dtype": st.sampled_from(["float32", "float64"]),
        "batch": st.integers(1, 3),
        "key_heads": st.integers(1, 2),
        "group": st.integers(1, 3),
        "query_length": st.integers(1, 20),
        "key_length": st.integers(keys, 20),
        "alibi": st.booleans(),
        "softcap": st.sampled_from([0.0, 2.0]),
    }
    chosen = {name: draw(strategy) for name, strategy in sizes.items() if name not in fixed}
    return Plan(**{**chosen, **fixed}).case(draw(strategies.SEEDS))


def assert_close(one: oracle.Array, other: oracle.Array) -> None:
    """Asserts that two computations of the same result agree as closely as each must agree with the exact one."""
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-12 if one.dtype == np.float64 else 4e-6)


def with_options(case: Case, **options: Any) -> Case:
    """The case with these options added."""
    return replace(case, options={**case.options, **options})


@given(case=cases(alibi=False), order=st.randoms())
def test_permuting_queries_permutes_the_rows(client: Client, case: Case, order: Any) -> None:
    rows = list(range(case.query.shape[2]))
    order.shuffle(rows)
    permuted = replace(case, query=case.query[:, :, rows]).attend(client)
    assert_close(permuted.output, case.attend(client).output[:, :, rows])


@given(case=cases(alibi=False), order=st.randoms())
def test_permuting_keys_and_values_changes_nothing(client: Client, case: Case, order: Any) -> None:
    keys = list(range(case.key.shape[2]))
    order.shuffle(keys)
    permuted = replace(case, key=case.key[:, :, keys], value=case.value[:, :, keys])
    assert_close(permuted.attend(client).output, case.attend(client).output)


@given(case=cases(keys=1, causal=True))
def test_weights_sum_to_1(client: Client, case: Case) -> None:
    weights = case.attend(client, return_scores="weights").scores
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), np.ones(weights.shape[:-1], weights.dtype))


@given(case=cases(keys=1, sinks=True))
def test_sinks_leave_less_than_1(client: Client, case: Case) -> None:
    result = case.attend(client, return_lse=True, return_scores="weights")
    share = np.exp(case.options["sinks"][None, :, None].astype(np.float64) - result.lse)
    assert_close(result.scores.sum(-1) + share.astype(result.scores.dtype), np.ones(share.shape, result.scores.dtype))


@given(case=cases(keys=1, causal=True))
def test_the_output_lies_in_the_convex_hull_of_the_values(client: Client, case: Case) -> None:
    """Within the bounding box of the values attended to, and below any random hyperplane that they all lie below."""
    output = case.attend(client).output.astype(np.float64)
    group = case.query.shape[1] // case.key.shape[1]
    values = np.repeat(case.value, group, axis=1).astype(np.float64)
    normals = np.random.default_rng(0).standard_normal((values.shape[-1], 8))
    directions = np.concatenate([np.eye(values.shape[-1]), normals], axis=1)
    for i in range(output.shape[2]):
        reached = values[:, :, : i + 1] @ directions
        mine = output[:, :, i] @ directions
        assert (mine <= reached.max(2) + 1e-5).all()
        assert (mine >= reached.min(2) - 1e-5).all()


@given(case=cases(keys=2, causal=True, query_length=12), data=st.data())
def test_no_row_depends_on_later_keys(client: Client, case: Case, data: st.DataObject) -> None:
    """Not by one bit, whatever the later keys are."""
    first = data.draw(st.integers(1, case.key.shape[2] - 1))
    key, value = case.key.copy(), case.value.copy()
    key[:, :, first:] *= 1.5
    value[:, :, first:] -= 100
    changed = replace(case, key=key, value=value).attend(client, return_lse=True)
    same = case.attend(client, return_lse=True)
    assert_same_bits(changed.output[:, :, :first], same.output[:, :, :first])
    assert_same_bits(changed.lse[:, :, :first], same.lse[:, :, :first])
    value[:, :, first:] = np.nan
    spoiled = replace(case, value=value).attend(client)
    assert_close(spoiled.output[:, :, :first], same.output[:, :, :first])


@given(case=cases(causal=True))
def test_an_open_window_is_no_window(client: Client, case: Case) -> None:
    assert_same_bits(with_options(case, window=(-1, -1)).attend(client).output, case.attend(client).output)


@given(case=cases(causal=True))
def test_a_wide_window_is_no_window(client: Client, case: Case) -> None:
    assert_close(with_options(case, window=(50, 50)).attend(client).output, case.attend(client).output)


@given(case=cases(sinks=True, causal=True))
def test_grouped_heads_equal_repeated_heads(client: Client, case: Case) -> None:
    group = case.query.shape[1] // case.key.shape[1]
    repeated = replace(case, key=np.repeat(case.key, group, axis=1), value=np.repeat(case.value, group, axis=1))
    one, other = case.attend(client, return_lse=True), repeated.attend(client, return_lse=True)
    assert_close(one.output, other.output)
    assert_close(one.lse, other.lse)


@given(case=cases(causal=True))
def test_identity_weights_are_the_dot_product(client: Client, case: Case) -> None:
    width = case.query.shape[-1]
    general = with_options(case, score=oracle.General(np.eye(width, dtype=np.float32)), scale=width**-0.5)
    assert_close(general.attend(client).output, case.attend(client).output)


@given(case=cases(causal=True, query_length=20, key_length=20, softcap=0.0, window=(7, 0)), chunk=st.integers(1, 7))
def test_prefill_at_once_in_chunks_and_token_by_token_agree(client: Client, case: Case, chunk: int) -> None:
    at_once = case.attend(client).output
    for size in (chunk, 1):
        futures = []
        for start in range(0, 20, size):
            stop = min(start + size, 20)  # the keys present by then, and the matching alignment
            part = Case(
                case.query[:, :, start:stop],
                case.key[:, :, :stop],
                case.value[:, :, :stop],
                {**case.options, "causal": "bottom_right"},
            )
            futures.append(part.submit(client))
        assert_close(np.concatenate([future.result().output for future in futures], axis=2), at_once)
        futures = [
            with_options(replace(case, query=case.query[:, :, start : start + size]), query_offset=start).submit(client)
            for start in range(0, 20, size)
        ]
        assert_close(np.concatenate([future.result().output for future in futures], axis=2), at_once)


@given(case=cases(keys=3, alibi=False, mask_shape=(1, 1, 1, 1)), data=st.data())
def test_results_over_disjoint_keys_merge(client: Client, case: Case, data: st.DataObject) -> None:
    """Split anywhere into three parts, some of them empty or excluded."""
    keys = case.key.shape[2]
    cuts = sorted(data.draw(st.lists(st.integers(0, keys), min_size=2, max_size=2)))
    mask = np.random.default_rng(1).random((case.query.shape[2], keys)) < 0.5
    whole = with_options(case, mask=mask).attend(client, return_lse=True)
    parts: list[AttentionResult[Any]] = []
    for start, stop in zip([0, *cuts], [*cuts, keys], strict=True):
        part = replace(case, key=case.key[:, :, start:stop], value=case.value[:, :, start:stop])
        parts.append(with_options(part, mask=mask[:, start:stop]).attend(client, return_lse=True))
    merged = merge_attention(parts)
    assert_close(merged.output, whole.output)
    assert merged.lse is not None
    infinite = whole.lse == -np.inf
    assert (merged.lse[infinite] == -np.inf).all()
    assert_close(np.where(infinite, 0, merged.lse), np.where(infinite, 0, whole.lse))


@given(case=cases(causal=True, mask_shape=(1, 1, 1, 1)), seed=strategies.SEEDS)
def test_the_dtype_of_an_equal_mask_changes_nothing(client: Client, case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = case.query.shape[2], case.key.shape[2]
    mask, bias = rng.random(grid) < 0.6, rng.standard_normal(grid).astype(np.float16)
    expected = with_options(case, mask=mask, bias=bias.astype(np.float32)).attend(client)
    for dtype in (np.int8, np.int64):
        result = with_options(case, mask=mask.astype(dtype), bias=bias.astype(np.float32)).attend(client)
        assert_same_bits(result.output, expected.output)
    for wider in (np.float16, np.float64):
        result = with_options(case, mask=mask, bias=bias.astype(wider)).attend(client)
        assert_same_bits(result.output, expected.output)
