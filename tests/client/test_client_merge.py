"""Merging attentions over disjoint keys, against attention over all keys at once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve import AttentionResult, LayerResult, Timings, merge_attention

torch = pytest.importorskip("torch")

TIMINGS = Timings(0, 0, 0, 0, 0, 0)


def attention(query: Any, key: Any, value: Any, keep: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp in float64, heads first; `keep` says which keys exist."""
    scores = np.where(keep, query @ key.swapaxes(-1, -2), -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - np.where(np.isinf(lse), 0, lse)[..., None])
    return weights @ value, lse


def parts(seed: int, rank: int, pieces: int) -> tuple[Any, list[tuple[Any, Any]]]:
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal((2, 3, length, 5)[4 - rank :]) for length in (4, 7, 7))
    owner = rng.integers(-1, pieces, 7)  # -1: nobody's
    whole = attention(query, key, value, owner >= 0)
    return whole, [attention(query, key, value, owner == piece) for piece in range(pieces)]


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4]), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_parts_make_the_whole(seed: int, rank: int, pieces: int, crossed: bool, in_torch: bool) -> None:
    (output, lse), some = parts(seed, rank, pieces)
    layout: Any = "length_first" if crossed else "heads_first"

    def arrange(array: Any) -> Any:
        return array.swapaxes(-2, -3) if crossed and rank > 2 else array

    given_parts: list[Any] = [(arrange(o), s) for o, s in some]
    if in_torch:
        given_parts = [(torch.from_numpy(o.copy()), torch.from_numpy(s)) for o, s in given_parts]
    merged = merge_attention(given_parts, layout=layout)
    assert isinstance(merged.output, torch.Tensor if in_torch else np.ndarray)
    np.testing.assert_allclose(np.asarray(merged.output), arrange(output), atol=1e-12)
    np.testing.assert_allclose(np.asarray(merged.lse), lse, atol=1e-12)


@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize("lse", [np.inf, np.nan])
def test_what_is_infinite_is_not_a_number_and_spoils_its_row_alone(in_torch: bool, lse: float) -> None:
    """As in attention over all keys, where such scores cannot be told apart."""
    lses = np.array([[0.0, lse, 0.0], [0.0, 0.0, -np.inf]])
    outputs = np.ones((2, 3, 4))
    pairs: list[Any] = list(zip(outputs, lses, strict=True))
    if in_torch:
        pairs = [(torch.from_numpy(o), torch.from_numpy(s)) for o, s in pairs]
    merged = merge_attention(pairs)
    np.testing.assert_array_equal(np.asarray(merged.output)[:, 0], [1, np.nan, 1])
    np.testing.assert_allclose(np.asarray(merged.lse), [np.log(2), np.nan, 0])


def test_packed_and_merged_again() -> None:
    (output, lse), some = parts(3, 3, 3)
    packed = [(o.swapaxes(0, 1), s) for o, s in some]
    first = merge_attention(packed[:2], layout="packed")
    merged = merge_attention([first, packed[2]], layout="packed")
    np.testing.assert_allclose(merged.output, output.swapaxes(0, 1), atol=1e-12)
    np.testing.assert_allclose(merged.lse, lse, atol=1e-12)


@pytest.mark.parametrize("in_torch", [False, True])
def test_rows_with_nothing_anywhere(in_torch: bool) -> None:
    output, lse = np.zeros((1, 2, 3), np.float32), np.full((1, 2), -np.inf, np.float32)
    pair: Any = (torch.from_numpy(output), torch.from_numpy(lse)) if in_torch else (output, lse)
    merged = merge_attention([pair, pair])
    np.testing.assert_array_equal(np.asarray(merged.output), output)
    np.testing.assert_array_equal(np.asarray(merged.lse), lse)


@pytest.mark.parametrize("in_torch", [False, True])
def test_what_another_kernel_gives_where_nothing_is_attended_is_ignored(in_torch: bool) -> None:
    """Some give NaN there; beside keys that are attended, and where none are."""
    lse = np.array([-np.inf, -np.inf, 0], np.float32)
    pairs: list[Any] = [(np.float32([[np.nan], [np.nan], [1]]), lse), (np.float32([[0], [3], [2]]), lse[::-1].copy())]
    if in_torch:
        pairs = [(torch.from_numpy(o), torch.from_numpy(s)) for o, s in pairs]
    merged = merge_attention(pairs)
    np.testing.assert_array_equal(np.asarray(merged.output), [[0], [0], [1]])
    np.testing.assert_array_equal(np.asarray(merged.lse), [0, -np.inf, 0])


def test_large_log_sum_exps_do_not_overflow() -> None:
    one, two = (
        (np.ones((1, 1), np.float32), np.array([1e4], np.float32)),
        (np.zeros((1, 1), np.float32), np.float32([1e4])),
    )
    merged = merge_attention([one, two])
    assert merged.output[0, 0] == 0.5
    assert merged.lse[0] == np.float32(1e4 + np.log(2))


@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize(("count", "ulps"), [(2, 0), (3, 1), (4, 0), (5, 1)])
def test_outputs_of_the_largest_number_do_not_overflow_however_many(count: int, ulps: int, in_torch: bool) -> None:
    """Their average is no larger than they are, but their sum is."""
    output, lse = np.full((2, 3), np.finfo(np.float32).max), np.zeros(2, np.float32)
    pair: Any = (torch.from_numpy(output), torch.from_numpy(lse)) if in_torch else (output, lse)
    np.testing.assert_array_max_ulp(np.asarray(merge_attention([pair] * count).output), output, ulps)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_stay_and_sums_are_wide(dtype: Any) -> None:
    """Many equal parts in half precision: their sum would stall at 2048 if it were kept in float16."""
    part = (np.full((1, 1), 1.5, dtype), np.zeros(1, np.float64 if dtype is np.float64 else np.float32))
    merged = merge_attention([part] * 5000)
    assert merged.output.dtype == dtype
    assert merged.output[0, 0] == 1.5
    assert merged.lse.dtype == part[1].dtype
    assert merged.lse[0] == pytest.approx(np.log(5000), rel=1e-6)


def test_torch_bfloat16() -> None:
    merged = merge_attention([(torch.ones(2, 3).bfloat16(), torch.zeros(2))] * 2)
    assert merged.output.dtype is torch.bfloat16
    assert torch.equal(merged.output, torch.ones(2, 3).bfloat16())
    assert merged.lse.dtype is torch.float32


def test_results_are_taken_as_they_come() -> None:
    result = AttentionResult(np.ones((2, 3)), np.zeros(2), None, TIMINGS, 1)
    np.testing.assert_array_equal(merge_attention([result, result]).lse, np.log([2, 2]))
    with pytest.raises(ValueError, match="return_lse"):
        merge_attention([AttentionResult(np.ones((2, 3)), None, None, TIMINGS, 1)])


@pytest.mark.parametrize(
    "results",
    [
        [],
        [(np.ones((2, 3, 4)), np.zeros((3, 2)))],
        [(np.ones((2, 3)), np.zeros(2)), (np.ones((2, 4)), np.zeros(2))],
        [(np.ones((2, 3)), np.zeros(2)), (np.ones((2, 3)), np.zeros(1))],
        [(np.ones((2, 3)), np.zeros(2), np.zeros(2))],
        [LayerResult(np.ones((2, 3)), np.zeros(2), None, TIMINGS, 1, 1)],
        AttentionResult(np.ones((2, 3)), np.zeros(2), None, TIMINGS, 1),
        [(np.ones((2, 3), np.int64), np.zeros(2))],
        [(np.ones((2, 3)), np.zeros(2, np.int64))],
        [(np.ones((2, 3), complex), np.zeros(2))],
        [(np.ones((2, 3), object), np.zeros(2))],
        [(np.ma.ones((2, 3)), np.zeros(2))],
        [(torch.ones(2, 3, dtype=torch.int64), torch.zeros(2))],
        np.ones((2, 3)),
        5,
    ],
)
def test_what_does_not_fit_is_refused(results: Any) -> None:
    with pytest.raises(ValueError, match="results: expected"):
        merge_attention(results)


@pytest.mark.parametrize("torch_part", [0, 1])
def test_numpy_and_torch_do_not_mix(torch_part: int) -> None:
    pair = [np.ones((1, 1), np.float32), np.zeros(1, np.float32)]
    mixed: list[Any] = [*pair]
    mixed[torch_part] = torch.from_numpy(pair[torch_part])
    for results in ([pair, mixed], [mixed]):
        with pytest.raises(ValueError, match="NumPy arrays or torch tensors, found both"):
            merge_attention(results)  # type: ignore[arg-type]


def test_a_layout_that_there_is_not_is_refused() -> None:
    """Where there are as many heads as queries, the shapes would fit any."""
    pair = np.ones((2, 2, 3), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"layout: expected one of 'heads_first'.*found 'bhld'"):
        merge_attention([pair], layout="bhld")  # type: ignore[arg-type]
