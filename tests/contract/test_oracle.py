"""The oracle itself: against torch's own kernel in float64, and against figures worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


def _qkv(seed: int, batch: int, heads: int, key_heads: int, length: int, keys: int) -> list[oracle.Array]:
    rng = np.random.default_rng(seed)
    shapes = (batch, heads, length, 8), (batch, key_heads, keys, 8), (batch, key_heads, keys, 5)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("variant", ["plain", "causal", "mask", "bias", "scale"])
def test_agrees_with_torch_in_float64(key_heads: int, variant: str) -> None:
    query, key, value = _qkv(1, 3, 4, key_heads, 6, 6)
    rng = np.random.default_rng(2)
    mask = rng.random((3, 1, 6, 6)) < 0.7
    mask[..., 0] = True  # torch versions differ on rows with nothing to attend to
    bias = rng.standard_normal((4, 6, 6))
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "causal": ({"causal": True}, {"is_causal": True}),
        "mask": ({"mask": mask}, {"attn_mask": torch.tensor(mask)}),
        "bias": ({"bias": bias}, {"attn_mask": torch.tensor(bias)[None].expand(3, 4, 6, 6)}),
        "scale": ({"scale": -0.3}, {"scale": -0.3}),
    }
    ours, torchs = cases[variant]
    q, k, v = (torch.tensor(array) for array in (query, key, value))
    theirs = scaled_dot_product_attention(q, k, v, enable_gqa=True, **torchs)
    np.testing.assert_allclose(oracle.attend(query, key, value, **ours).output, theirs.numpy(), rtol=0, atol=1e-13)


def _who_attends(length: int, keys: int, **options: Any) -> list[str]:
    expected = oracle.attend(np.ones((length, 2)), np.ones((keys, 2)), np.ones((keys, 1)), **options)
    return ["".join(".x"[int(seen)] for seen in row) for row in expected.attended]


def test_who_attends_whom() -> None:
    assert _who_attends(3, 4, causal=True) == ["x...", "xx..", "xxx."]
    assert _who_attends(3, 4, causal="top_left") == ["x...", "xx..", "xxx."]
    assert _who_attends(2, 4, causal="bottom_right") == ["xxx.", "xxxx"]
    assert _who_attends(4, 2, causal="bottom_right") == ["..", "..", "x.", "xx"]
    assert _who_attends(2, 4, causal="bottom_right", kv_lengths=[3]) == ["xx..", "xxx."]
    assert _who_attends(2, 4, causal="bottom_right", query_offset=0) == ["x...", "xx.."]
    assert _who_attends(3, 4, window=(1, 0)) == ["x...", "xx..", ".xx."]
    assert _who_attends(3, 4, window=(-1, 1)) == ["xx..", "xxx.", "xxxx"]
    assert _who_attends(3, 4, window=(0, -1)) == ["xxxx", ".xxx", "..xx"]
    assert _who_attends(3, 4, window=(-1, -1)) == ["xxxx"] * 3
    assert _who_attends(2, 4, window=(1, 1), query_offset=2) == [".xxx", "..xx"]
    assert _who_attends(3, 4, query_offset=-1, causal=True) == ["....", "x...", "xx.."]
    assert _who_attends(2, 4, kv_lengths=[1]) == ["x...", "x..."]
    assert _who_attends(2, 3, mask=np.array([True, False, True]), causal=True) == ["x..", "x.."]


def test_scores_by_hand() -> None:
    """One query against two keys: every stage can be worked out on paper."""
    query, key, value = np.array([[1.0, 2.0]]), np.array([[3.0, 1.0], [-1.0, 0.5]]), np.array([[10.0], [20.0]])
    expected = oracle.attend(
        query,
        key,
        value,
        scale=2.0,
        softcap=4.0,
        bias=np.array([0.25, -0.5]),
        alibi_slopes=np.array([0.5]),
        query_offset=3,
        sinks=np.array([0.125]),
    )
    raw = [2.0 * (3 + 2), 2.0 * (-1 + 1)]
    capped = [4 * math.tanh(raw[0] / 4), 0.0]
    masked = [capped[0] + 0.25 - 0.5 * 3, capped[1] - 0.5 - 0.5 * 2]
    total = math.exp(masked[0]) + math.exp(masked[1]) + math.exp(0.125)
    weights = [math.exp(m) / total for m in masked]
    np.testing.assert_allclose(expected.raw, [raw], atol=1e-14)
    np.testing.assert_allclose(expected.capped, [capped], atol=1e-14)
    np.testing.assert_allclose(expected.masked, [masked], atol=1e-14)
    np.testing.assert_allclose(expected.weights, [weights], atol=1e-14)
    np.testing.assert_allclose(expected.lse, [math.log(total)], atol=1e-14)
    np.testing.assert_allclose(expected.output, [[10 * weights[0] + 20 * weights[1]]], atol=1e-13)


def test_score_functions_by_hand() -> None:
    query, key, value = np.array([[1.0, -1.0]]), np.array([[2.0, 0.0, 1.0]]), np.ones((1, 1))
    weight = np.array([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])
    assert oracle.attend(query, key, value, score=oracle.General(weight)).raw == (1 - 0.5) * 2 + (3 + 1) * 1
    assert oracle.attend(query, key, value, score=oracle.General(weight), scale=-2.0).raw == -10
    of_query, of_key = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[0.5, 0.0, 0.0], [0.0, 0.0, 3.0]])
    additive = oracle.Additive(of_query, of_key)
    assert oracle.attend(query, key, value, score=additive).raw == math.tanh(1 + 1) + math.tanh(-2 + 3)
    additive = oracle.Additive(of_query, of_key, np.array([0.5, -0.25]), np.array([2.0, -1.0]))
    raw = oracle.attend(query, key, value, score=additive, scale=3.0).raw
    np.testing.assert_allclose(raw, 3 * (2 * math.tanh(2.5) - math.tanh(0.75)), rtol=1e-15)


def test_rows_with_nothing_to_attend() -> None:
    query, key, value = _qkv(3, 1, 2, 2, 3, 4)
    key[:, :, 2:], value[:, :, 2:] = np.nan, np.inf
    expected = oracle.attend(query, key, value, kv_lengths=[2], causal=True, query_offset=-1)
    assert np.isfinite(expected.output).all()
    assert (expected.output[:, :, 0] == 0).all()
    assert (expected.lse[:, :, 0] == -np.inf).all()
    assert (expected.weights[:, :, 0] == 0).all()
    assert np.isfinite(expected.lse[:, :, 1:]).all()
    sinks = np.array([0.5, -3.0])
    expected = oracle.attend(query, key, value, kv_lengths=[0], sinks=sinks)
    assert (expected.output == 0).all()
    np.testing.assert_array_equal(expected.lse, np.broadcast_to(sinks[None, :, None], (1, 2, 3)))


def test_packed_is_each_sequence_alone() -> None:
    rng = np.random.default_rng(4)
    lengths, kv_lengths = [2, 0, 3], [4, 2, 1]
    query, key, value = (rng.standard_normal((n, h, 4)) for n, h in ((5, 4), (7, 2), (7, 2)))
    mask, bias = rng.random((3, 1, 3, 4)) < 0.8, rng.standard_normal((4, 3, 4))
    options: dict[str, Any] = {
        "causal": "bottom_right",
        "sinks": rng.standard_normal(4),
        "alibi_slopes": rng.standard_normal(4),
    }
    whole = oracle.attend(
        query,
        key,
        value,
        layout="packed",
        query_lengths=lengths,
        kv_lengths=kv_lengths,
        mask=mask,
        bias=bias,
        **options,
    )
    assert whole.output.shape == (5, 4, 4)
    assert whole.lse.shape == (4, 5)
    assert whole.weights.shape == (4, 5, 4)
    for b, (i, n, j, s) in enumerate([(0, 2, 0, 4), (2, 0, 4, 2), (2, 3, 6, 1)]):
        alone = oracle.attend(
            query[i : i + n],
            key[j : j + s],
            value[j : j + s],
            layout="length_first",
            mask=mask[b, :, :n, :s],
            bias=bias[:, :n, :s],
            **options,
        )
        np.testing.assert_array_equal(whole.output[i : i + n], alone.output)
        np.testing.assert_array_equal(whole.lse[:, i : i + n], alone.lse)
        for stage in oracle.STAGES:
            rows = getattr(whole, stage)[:, i : i + n]
            np.testing.assert_array_equal(rows[..., :s], getattr(alone, stage))
            assert (rows[..., s:] == (0 if stage == "weights" else -np.inf)).all()


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layouts_and_ranks_differ_in_shape_alone(rank: int) -> None:
    query, key, value = _qkv(5, 2, 3, 3, 4, 5)
    first = oracle.attend(query, key, value, causal=True)
    lower = (0,) * (4 - rank)
    heads_first = [array[lower] for array in (query, key, value)]
    length_first = [array if rank == 2 else array.swapaxes(-3, -2) for array in heads_first]
    by_heads = oracle.attend(*heads_first, causal=True)
    by_length = oracle.attend(*length_first, causal=True, layout="length_first")
    np.testing.assert_array_equal(by_heads.output, first.output[lower])
    np.testing.assert_array_equal(by_length.output if rank == 2 else by_length.output.swapaxes(-3, -2), by_heads.output)
    for expected in (by_heads, by_length):
        np.testing.assert_array_equal(expected.lse, first.lse[lower])
        np.testing.assert_array_equal(expected.weights, first.weights[lower])
