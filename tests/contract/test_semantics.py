"""Every option of the contract, one at a time, through the real server against the oracle; the order of the steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import oracle
import pytest
import torch
from cases import DTYPES, Case, Plan
from features import FEATURES
from torch.nn.functional import scaled_dot_product_attention

from attnserve import Client

EVERY_DTYPE = pytest.mark.parametrize("dtype", sorted(DTYPES))


@EVERY_DTYPE
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_alone(client: Client, feature: str, dtype: str) -> None:
    case = Plan(dtype=dtype, **FEATURES[feature]).case(1)
    accuracy.check(case, case.attend(client))
    result = case.attend(client, return_lse=True)
    assert result.lse is not None
    accuracy.check(case, result)
    accuracy.check(case, case.attend(client, return_lse=True, return_scores="masked"), "masked")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("layout", ["length_first", "packed"])
def test_every_feature_in_every_layout(client: Client, layout: str, feature: str) -> None:
    plan = Plan(layout=layout, **FEATURES[feature])
    if layout == "packed":
        kept = plan.kv_lengths or (plan.key_length,) * plan.batch
        queries = (plan.query_length, *range(plan.batch - 1))
        plan = replace(plan, rank=3, kv_lengths=kept, query_lengths=queries)
        if plan.kv_lengths != (plan.key_length,) * plan.batch:  # the longest may be shorter than the plan says
            plan = replace(plan, key_length=max(kept))
    case = plan.case(2)
    accuracy.check(case, case.attend(client, return_lse=True))
    accuracy.check(case, case.attend(client, return_lse=True, return_scores="weights"), "weights")


@EVERY_DTYPE
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("layout", ["heads_first", "length_first"])
def test_every_rank(client: Client, layout: str, rank: int, dtype: str) -> None:
    plan = Plan(dtype=dtype, layout=layout, rank=rank, batch=1 if rank < 4 else 3, causal=True, sinks=True)
    case = replace(plan, key_heads=1 if rank == 2 else 2).case(3)
    accuracy.check(case, case.attend(client, return_lse=True, return_scores="weights"), "weights")


@EVERY_DTYPE
@pytest.mark.parametrize("stage", oracle.STAGES)
@pytest.mark.parametrize("score", ["dot", "general", "additive"])
def test_every_stage_of_scores(client: Client, score: str, stage: str, dtype: str) -> None:
    plan = Plan(dtype=dtype, score=score, softcap=1.0, bias_shape=(5, 7), alibi=True, causal=True, sinks=True, group=2)
    case = replace(plan, kv_lengths=(6, 2)).case(4)
    result = case.attend(client, return_scores=stage)
    assert result.lse is None
    accuracy.check(case, result, stage)


@EVERY_DTYPE
def test_capping_comes_before_masking(client: Client, dtype: str) -> None:
    """Capped after masking, an excluded key would score -softcap instead of -inf, and have a weight above 0."""
    case = Plan(dtype=dtype, query_length=4, key_length=4, softcap=0.5, causal=True).case(5)
    case.value[:, :, 1:] = 1000
    result = case.attend(client, return_scores="weights")
    np.testing.assert_array_equal(result.output[:, :, 0], case.value[:, :, 0])
    assert (result.scores[~case.expected.attended] == 0).all()


@EVERY_DTYPE
@pytest.mark.parametrize("added", ["bias", "alibi_slopes"])
def test_capping_comes_before_bias_and_alibi(client: Client, added: str, dtype: str) -> None:
    """Capped after the bias, no two scores could differ by more than twice the softcap."""
    plain = Plan(dtype=dtype, batch=1, key_heads=1, query_length=1, key_length=3, softcap=0.5).case(6)
    option = np.array({"bias": [0, -8, -16], "alibi_slopes": [8]}[added], dtype=np.float32)
    case = replace(plain, options={**plain.options, added: option})
    scores = case.attend(client, return_scores="masked").scores.astype(np.float64)[0, 0, 0]
    assert scores[0] - scores[2] > 14
    accuracy.check(case, case.attend(client, return_scores="masked"), "masked")


@EVERY_DTYPE
def test_absent_scale_is_not_scale_0(client: Client, dtype: str) -> None:
    plan = Plan(dtype=dtype)
    absent, zero = plan.case(7), replace(plan, scale=0.0).case(7)
    assert (absent.attend(client).output != zero.attend(client).output).any()
    assert (zero.attend(client, return_scores="raw").scores == 0).all()


@EVERY_DTYPE
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}, {"bias": True}, {"scale": 0.1}])
@pytest.mark.parametrize("group", [1, 2])
def test_against_torchs_own_attention(client: Client, group: int, options: dict[str, Any], dtype: str) -> None:
    """The reference is torch in float64, which shares nothing with the oracle."""
    plan = Plan(dtype=dtype, group=group, query_length=33, key_length=33, head_dim=32, key_dim=32, value_dim=32)
    case, rng = plan.case(8), np.random.default_rng(9)
    ours: dict[str, Any] = dict(options)
    theirs: dict[str, Any] = {"is_causal": options.get("causal", False), "scale": options.get("scale")}
    if "mask" in options:
        ours["mask"] = (rng.random((33, 33)) < 0.5) | np.eye(33, dtype=bool)
        theirs["attn_mask"] = torch.tensor(ours["mask"])
    if "bias" in options:
        ours["bias"] = rng.standard_normal((33, 33)).astype(np.float16).astype(np.float32)
        theirs["attn_mask"] = torch.tensor(ours["bias"])

    def torchs(wide: torch.dtype) -> torch.Tensor:
        arrays = (case.query, case.key, case.value)
        q, k, v = (torch.tensor(array.astype(np.float64)).to(wide) for array in arrays)
        mask = theirs.get("attn_mask")
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(wide)
        return scaled_dot_product_attention(q, k, v, **{**theirs, "attn_mask": mask}, enable_gqa=True).double()

    exact = torchs(torch.float64).numpy()
    output = replace(case, options={**case.options, **ours}).attend(client).output.astype(np.float64)
    narrow = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(dtype)
    their_error = 0.0 if narrow is None else float(np.abs(torchs(narrow).numpy() - exact).max())
    assert np.abs(output - exact).max() <= {"float32": 2e-6, "float64": 1e-12}.get(dtype, 2 * their_error + 1e-5)


@EVERY_DTYPE
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"mask_shape": ()},
        {"kv_lengths": (0, 0)},
        {"causal": True, "query_offset": -5},
        {"window": (1, 1), "query_offset": 100},
        {"key_length": 0},
    ],
    ids=["mask", "lengths", "causal", "window", "no keys"],
)
def test_rows_with_nothing_to_attend(client: Client, options: dict[str, Any], sinks: bool, dtype: str) -> None:
    case = Plan(dtype=dtype, group=2, sinks=sinks, **options).case(10)
    if "mask" in case.options:
        case.options["mask"] = np.array(False)
    result = case.attend(client, return_lse=True, return_scores="weights")
    assert (result.output.astype(np.float64) == 0).all()
    assert (result.scores.astype(np.float64) == 0).all()
    if not sinks:
        assert (result.lse == -np.inf).all()
    accuracy.check(case, result, "weights")
    accuracy.check(case, case.attend(client, return_lse=True))


@EVERY_DTYPE
@pytest.mark.parametrize("returned", [{}, {"return_scores": "weights"}])
def test_a_large_finite_bias_is_a_value_not_a_mask(client: Client, returned: dict[str, Any], dtype: str) -> None:
    plain = Plan(dtype=dtype).case(11)
    lowest = np.full((5, 7), np.finfo(np.float32).min)
    everywhere = replace(plain, options={**plain.options, "bias": lowest})
    mean = plain.value.astype(np.float64).mean(-2, keepdims=True)
    output = everywhere.attend(client, **returned).output.astype(np.float64)
    assert np.abs(output - mean).max() <= accuracy.output_bound(plain)
    lowest[:, 1:] = 0  # now the key with the bias has weight 0, but its NaN counts
    plain.value[:, :, 0] = np.nan
    biased = replace(plain, options={**plain.options, "bias": lowest})
    assert np.isnan(biased.attend(client, **returned).output.astype(np.float64)).all()


@EVERY_DTYPE
def test_an_infinitely_low_bias_weighs_nothing(client: Client, dtype: str) -> None:
    case = Plan(dtype=dtype, bias_shape=(5, 7)).case(12)
    case.options["bias"][:, 2] = -np.inf
    result = case.attend(client, return_lse=True, return_scores="weights")
    assert (result.scores[..., 2] == 0).all()
    accuracy.check(case, result, "weights")
    accuracy.check(case, case.attend(client, return_lse=True))


@EVERY_DTYPE
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"causal": True}, {"alibi": True}, {"softcap": 2.0}])
def test_a_row_whose_biases_are_all_minus_infinity_is_zeros(
    client: Client, options: dict[str, Any], dtype: str
) -> None:
    """Though no mask excludes its keys: a NaN in their values reaches the output."""
    case = Plan(dtype=dtype, bias_shape=(5, 7), **options).case(13)
    case.options["bias"][[1, 4]] = -np.inf
    result = case.attend(client, return_lse=True, return_scores="weights")
    assert (result.output[:, :, [1, 4]].astype(np.float64) == 0).all()
    assert (result.scores[:, :, [1, 4]].astype(np.float64) == 0).all()
    assert "sinks" in options or (result.lse[:, :, [1, 4]] == -np.inf).all()
    accuracy.check(case, result, "weights")
    accuracy.check(case, case.attend(client, return_lse=True))
    query, key, value = (array[:1] for array in (case.query, case.key, case.value))
    one = replace(case, query=query, key=key, value=value)
    stored = "float32" if dtype == "float64" else dtype
    with client.create_cache(2, 8, dtype=stored) as cache:
        cache.append(key[0], value[0])
        kept = replace(one, key=key.astype(DTYPES[stored]), value=value.astype(DTYPES[stored]))
        top_left = {**case.arguments, "query_offset": 0}
        accuracy.check(kept, client.attend(query, caches=cache, **top_left, return_lse=True))
    value[:, :, 0] = np.nan
    assert np.isnan(one.attend(client).output[:, :, [1, 4]].astype(np.float64)).all()


@EVERY_DTYPE
def test_sinks_take_their_share(client: Client, dtype: str) -> None:
    """A sink acts as one more key whose value is zero: adding that key gives the same result."""
    case = Plan(dtype=dtype, batch=1, key_heads=2, sinks=True, scale=1.0).case(13)
    with_sinks = case.attend(client, return_lse=True)
    sinks = np.asarray(case.options.pop("sinks"), dtype=np.float32)
    bias = np.zeros((2, 1, 8), np.float32)
    bias[:, 0, 7] = sinks
    key, value = (np.concatenate([t, np.zeros_like(t[:, :, :1])], axis=2) for t in (case.key, case.value))
    with_key = Case(case.query, key, value, {**case.options, "bias": bias}).attend(client, return_lse=True)
    bound = 2 * accuracy.output_bound(Case(case.query, key, value, {**case.options, "bias": bias}))
    np.testing.assert_allclose(
        with_sinks.output.astype(np.float64), with_key.output.astype(np.float64), atol=bound, rtol=0
    )
    np.testing.assert_allclose(with_sinks.lse, with_key.lse, atol=2e-4 if "16" in dtype else 4e-6, rtol=0)
