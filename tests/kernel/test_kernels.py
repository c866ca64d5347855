"""The kernels themselves, without a service around them: against the oracle, and on torch's known traps.

The traps: a kernel that kills the process at zero lengths, a log-sum-exp of 0 where nothing is attended to, NaN that is
swallowed or leaks, and bits that depend on a tensor's memory address and on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import accuracy
import ml_dtypes
import numpy as np
import oracle
import pytest
import strategies
import torch
from bits import assert_same_bits, assert_same_results
from cases import DTYPES, Plan
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import call_of, run, tensor
from torch.nn.functional import scaled_dot_product_attention

from attnserve_server.kernels import attend

EVERY_DTYPE = pytest.mark.parametrize("dtype", sorted(DTYPES))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """One thread per call, as on the CPU device: with more, the bits of torch's own kernels depend on the batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PLANS = strategies.plans(dense=True)
RETURNS = {"return_lse": st.booleans(), "return_scores": st.sampled_from([None, None, *oracle.STAGES])}


@strategies.MANY
@given(plan=PLANS, seed=strategies.SEEDS, returned=st.fixed_dictionaries(RETURNS))
def test_random_calls(plan: Plan, seed: int, returned: dict[str, Any]) -> None:
    case = plan.case(seed)
    accuracy.check(case, run(call_of(case, **returned)), returned["return_scores"])


@strategies.MANY
@given(plan=PLANS, seed=strategies.SEEDS, returned=st.fixed_dictionaries(RETURNS))
def test_a_stack_has_the_bits_of_each_sequence_alone(plan: Plan, seed: int, returned: dict[str, Any]) -> None:
    case = replace(plan, batch=4, mask_shape=None, bias_shape=None).case(seed)
    call = call_of(case, **returned)
    together = run(call)
    for n in (seed % 3, 3):
        alone = run(replace(call, query=call.query[n : n + 1], key=call.key[n : n + 1], value=call.value[n : n + 1]))
        for name in ("output", "lse", "scores"):
            if getattr(alone, name) is not None:
                assert_same_bits(getattr(alone, name), getattr(together, name)[n : n + 1], name)


@EVERY_DTYPE
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sinks": True}, {"softcap": 2.0}, {"score": "additive"}])
def test_zero_lengths_do_not_kill_the_process(dtype: str, lengths: tuple[int, int], options: dict[str, Any]) -> None:
    plan = Plan(dtype=dtype, query_length=lengths[0], key_length=lengths[1], **options)
    case = plan.case(0)
    accuracy.check(case, run(call_of(case, return_lse=True)))
    accuracy.check(case, run(call_of(case, return_lse=True, return_scores="weights")), "weights")


@EVERY_DTYPE
@pytest.mark.parametrize("how", ["mask", "causal", "window"])
def test_rows_with_nothing_to_attend_have_an_lse_of_minus_infinity(dtype: str, how: str) -> None:
    mask = np.ones((2, 1, 9, 7), dtype=bool)
    mask[:, :, 3:5] = False
    case = Plan(dtype=dtype, query_length=9, key_length=7).case(1)
    excluding: dict[str, dict[str, Any]] = {
        "mask": {"mask": mask},
        "causal": {"causal": True, "query_offset": -3},
        "window": {"window": (0, 0)},
    }
    case.options.update(excluding[how])
    result = run(call_of(case, return_lse=True))
    empty = ~case.expected.attended.any(-1)
    assert empty.any()
    assert not empty.all()
    assert (result.lse[empty] == -np.inf).all()
    assert (result.output[empty].astype(np.float64) == 0).all()
    accuracy.check(case, result)


@EVERY_DTYPE
def test_a_nan_in_a_query_spoils_its_own_row_and_no_other(dtype: str) -> None:
    case = Plan(dtype=dtype, causal=True, query_offset=-1).case(2)
    case.query[:, :, [0, 3], 1] = np.nan  # row 0 has nothing to attend to, so its query does not matter
    result = run(call_of(case, return_lse=True))
    assert np.isnan(result.output[:, :, 3].astype(np.float64)).all()
    assert np.isnan(result.lse[:, :, 3]).all()
    assert (result.output[:, :, 0].astype(np.float64) == 0).all()
    accuracy.check(case, result)


@EVERY_DTYPE
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "key_length": 5}, {"mask_shape": (5, 7)}])
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5, 1e-45, 1e-310])
def test_masks_survive_any_scale(dtype: str, scale: float, options: dict[str, Any]) -> None:
    """Scaling after masking would turn minus infinity into NaN or plus infinity."""
    case = Plan(dtype=dtype, scale=scale, **options).case(3)
    accuracy.check(case, run(call_of(case, return_lse=True)))


@EVERY_DTYPE
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"alibi": True}, {"score": "general"}, {"score": "additive"}]
)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_excluded_never_leaks(dtype: str, options: dict[str, Any], poison: float) -> None:
    """The last key is NaN or infinite. Causal rows before it must be unaffected; rows that attend to it must not."""
    case = Plan(dtype=dtype, causal=True, query_length=7, key_length=7, **options).case(3)
    case.value[:, :, -1] = poison
    result = run(call_of(case, return_lse=True))
    assert np.isfinite(result.output[:, :, :-1].astype(np.float64)).all()
    assert not np.isfinite(result.output[:, :, -1].astype(np.float64)).any()
    accuracy.check(case, result)
    case = Plan(dtype=dtype, causal=True, query_length=7, key_length=7, **options).case(3)
    case.key[:, :, -1] = np.nan
    result = run(call_of(case, return_lse=True))
    assert np.isfinite(result.output[:, :, :-1].astype(np.float64)).all()
    assert np.isnan(result.output[:, :, -1].astype(np.float64)).all()
    accuracy.check(case, result)


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"alibi": True}, {"softcap": 2.0}, {"group": 3}])
def test_bits_do_not_depend_on_where_tensors_lie(dtype: str, length: int, options: dict[str, Any]) -> None:
    plan = Plan(dtype=dtype, query_length=length, key_length=19, head_dim=20, key_dim=20, value_dim=20, **options)
    call = call_of(plan.case(4), return_lse=True)

    def moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
        begin = (-room.data_ptr() // room.element_size()) % 16 + elements
        place = room[begin : begin + tensor.numel()].view(tensor.shape)
        return place.copy_(tensor)

    expected = run(call)
    for elements in (0, 1, 2, 3, 5, 8, 15):
        query, key, value = (moved(part, elements) for part in (call.query, call.key, call.value))
        assert_same_results(run(replace(call, query=query, key=key, value=value)), expected)


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("options", [{}, {"group": 4}, {"softcap": 2.0}, {"score": "general"}])
def test_bits_do_not_depend_on_strides(dtype: str, length: int, options: dict[str, Any]) -> None:
    """Length-first in memory, as sent by a caller with that layout."""
    plan = Plan(dtype=dtype, query_length=length, key_length=40, **options)
    call = call_of(plan.case(5), return_lse=True)
    query, key, value = (
        part.transpose(1, 2).contiguous().transpose(1, 2) for part in (call.query, call.key, call.value)
    )
    assert_same_results(run(replace(call, query=query, key=key, value=value)), run(call))


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("length", "keys", "width", "value_width"), [(1, 130, 64, 64), (40, 40, 64, 64), (9, 33, 20, 48)]
)
@pytest.mark.parametrize("group", [1, 4])
def test_against_torchs_own_attention(
    dtype: str, length: int, keys: int, width: int, value_width: int, group: int
) -> None:
    """At the sizes of real models; the reference is torch in float64 on the same numbers."""
    plan = Plan(
        dtype=dtype,
        query_length=length,
        key_length=keys,
        head_dim=width,
        key_dim=width,
        value_dim=value_width,
        group=group,
    )
    call = call_of(replace(plan, mask_shape=(2, 1, length, keys)).case(6), return_lse=True)

    def torchs(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = tensors
        return scaled_dot_product_attention(q, k, v, attn_mask=call.mask, enable_gqa=True).double()

    parts = call.query, call.key, call.value
    exact = torchs(*(part.double() for part in parts))
    error = (attend(call).output.double() - exact).abs().max().item()
    theirs = (torchs(*parts) - exact).abs().max().item()
    assert error <= {"float32": 2e-6, "float64": 1e-12}.get(dtype, 2 * theirs + 1e-5)


@EVERY_DTYPE
def test_long_sequences(dtype: str) -> None:
    """Longer than the kernels' blocks, and not a multiple of any block size."""
    for options in ({"causal": True}, {"window": (30, 5)}, {"alibi": True, "sinks": True}):
        plan = Plan(dtype=dtype, batch=1, group=2, key_heads=1, query_length=531, key_length=777, **options)
        case = plan.case(7)
        accuracy.check(case, run(call_of(case, return_lse=True)))


@EVERY_DTYPE
@pytest.mark.parametrize(("length", "key_length"), [(63, 63), (64, 64), (97, 97), (97, 40), (250, 250), (513, 513)])
def test_causal_lengths_that_are_computed_in_blocks(dtype: str, length: int, key_length: int) -> None:
    """And neighbouring lengths; a sequence and a head have the same bits as when computed alone."""
    plan = Plan(dtype=dtype, causal=True, group=2, query_length=length, key_length=key_length, head_dim=20, key_dim=20)
    case = plan.case(11)
    call = call_of(case, return_lse=True)
    result = run(call)
    accuracy.check(case, result)
    assert_same_results(run(replace(call, finite=True)), result)
    for part, of_part in ((call.sequences(1, 2), np.s_[1:]), (call.kv_heads(1, 2), np.s_[:, 2:])):
        alone = run(part)
        assert_same_bits(alone.output, result.output[of_part])
        assert_same_bits(alone.lse, result.lse[of_part])


@EVERY_DTYPE
@pytest.mark.parametrize("added", [{"bias_shape": (65, 40)}, {"bias_shape": (1,)}, {"alibi": True}, {"sinks": True}])
def test_what_is_added_to_causal_scores_is_added_at_every_length(dtype: str, added: dict[str, Any]) -> None:
    plan = Plan(dtype=dtype, causal=True, group=2, query_length=65, key_length=40, **added)
    case = plan.case(14)
    accuracy.check(case, run(call_of(case, return_lse=True)))


@pytest.mark.parametrize("length", [9, 100])
def test_a_score_that_overflows_stays_with_those_who_attend_it(length: int) -> None:
    """The key is finite but its score is not in float32: it outweighs all others for the query that attends to it, and
    earlier queries and other sequences must be unaffected.
    """
    case = Plan(causal=True, query_length=length, key_length=length).case(12)
    expected = run(call_of(case, return_lse=True))
    case.key[1, :, -1] = 3e38
    case.query[1, :, :] = abs(case.query[1, :, :]) + 3e2
    result = run(call_of(case, return_lse=True))
    assert np.isfinite(result.output[1, :, :-1]).all()
    np.testing.assert_array_equal(result.output[1, :, -1], case.value[1, :, -1])
    assert np.isinf(result.lse[1, :, -1]).all()
    assert_same_bits(result.output[0], expected.output[0])


def test_a_score_that_overflows_leaves_other_heads_their_bits() -> None:
    """Heads may be computed separately: their bits must not show it."""
    plan = Plan(causal=True, query_length=500, key_length=500, head_dim=64, key_dim=64)
    call = call_of(plan.case(12), return_lse=True)
    first = call.kv_heads(0, 1)
    group = first.query.shape[1]
    call.key[1, 1, -1] = 3e38
    call.query[1, group:] = call.query[1, group:].abs() + 3e2
    assert np.isinf(run(call).lse[1, group:]).any()
    assert_same_bits(run(first).output, run(call).output[:, :group])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "excluding", [{"mask_shape": (2, 1, 9, 7)}, {"window": (2, 1)}, {"alibi": True, "causal": True}]
)
def test_an_excluded_score_that_overflows_is_excluded(dtype: str, excluding: dict[str, Any]) -> None:
    """Query and key are finite but their score is not: adding minus infinity would make it NaN."""
    case = Plan(dtype=dtype, query_length=9, key_length=7, **excluding).case(13)
    if "mask" in case.options:
        case.options["mask"][..., -1] = False
    case.query[:, :, :2] = case.key[:, :, -1] = 1e300 if dtype == "float64" else 1e30
    result = run(call_of(case, return_lse=True))
    assert np.isfinite(result.output.astype(np.float64)).all()


@EVERY_DTYPE
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query_length": 1, "group": 3},
        {"causal": True, "query_length": 100},
        {"window": (30, 0), "causal": "bottom_right", "sinks": True},
        {"mask_shape": (2, 1, 20, 100), "bias_shape": (100,)},
        {"alibi": True},
        {"softcap": 2.0},
    ],
)
def test_weighted_values_may_exceed_the_dtype_before_they_are_divided(options: dict[str, Any], dtype: str) -> None:
    """The output is an average of values near the largest of the dtype; a sum of them with weights up to 1 is not."""
    case = Plan(dtype=dtype, **{"query_length": 20, "key_length": 100, **options}).case(20)
    largest = float(ml_dtypes.finfo(case.value.dtype).max)
    case.value[...] = np.random.default_rng(20).uniform(-0.5, 1, case.value.shape) * (0.9 * largest)
    for finite in (False, True):
        result = run(replace(call_of(case, return_lse=True), finite=finite))
        error = np.abs(result.output.astype(np.float64) / largest - case.expected.output / largest).max()
        assert error <= {"float32": 2e-6, "float64": 1e-12, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
        np.testing.assert_allclose(result.lse, case.expected.lse, rtol=0, atol=1e-4)


@EVERY_DTYPE
@pytest.mark.parametrize("lengths", [(33, 1), (1, 9), (1, 1), (7, 9)])
@pytest.mark.parametrize(
    "options",
    [
        {"score": "additive", "hidden": 1, "head_dim": 1},
        {"score": "general", "head_dim": 1},
        {"softcap": 0.5},
        {"causal": "bottom_right"},
        {"bias_shape": (1,)},
    ],
)
def test_bits_do_not_depend_on_the_layout(options: dict[str, Any], lengths: tuple[int, int], dtype: str) -> None:
    """Heads first or length first: axes of length 1 differ in nothing but their strides."""
    sizes = {"batch": 3, "key_heads": 5, "group": 5, "query_length": lengths[0], "key_length": lengths[1]}
    for seed in range(3):
        call = call_of(Plan(dtype=dtype, sinks=True, **sizes, **options).case(seed), return_lse=True)
        length_first = replace(
            call, query=_length_first(call.query), key=_length_first(call.key), value=_length_first(call.value)
        )
        assert_same_results(run(length_first), run(call))


def _length_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor [N, H, L, D] in memory of [N, L, H, D], with the strides of that."""
    count, heads, length, width = tensor.shape
    return torch.empty(count, length, heads, width, dtype=tensor.dtype).copy_(tensor.transpose(1, 2)).transpose(1, 2)


def test_values_that_overflow_a_sum_leave_other_heads_their_bits() -> None:
    call = call_of(Plan(causal=True, query_length=100, key_length=100).case(21), return_lse=True)
    expected = run(call)
    call.value[1, 1] = 3e38
    result = run(call)
    assert np.isfinite(result.output).all()
    assert_same_bits(result.output[0], expected.output[0])
    assert_same_bits(result.output[1, :-1], expected.output[1, :-1])


def test_the_blocks_of_a_call_with_alibi_do_not_follow_its_heads() -> None:
    """Heads may be computed separately: their bits must not show it."""
    plan = Plan(batch=1, key_heads=8, group=1, query_length=1536, key_length=1536, alibi=True, causal=True)
    call = call_of(plan.case(14), return_lse=True)
    half, whole = run(call.kv_heads(0, 4)), run(call)
    assert_same_bits(half.output, whole.output[:, :4])
    assert_same_bits(half.lse, whole.lse[:, :4])


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group": 3},
        {"causal": True},
        {"mask_shape": (7,)},
        {"bias_shape": (7,)},
        {"alibi": True},
        {"sinks": True},
        {"alibi": True, "sinks": True},
        {"softcap": 2.0},
    ],
)
def test_what_is_known_to_be_finite_has_the_same_bits(dtype: str, length: int, options: dict[str, Any]) -> None:
    call = call_of(Plan(dtype=dtype, query_length=length, **options).case(8), return_lse=True)
    assert_same_results(run(replace(call, finite=True)), run(call))


@pytest.mark.parametrize(
    ("dtype", "narrower"),
    [("float32", "float16"), ("float32", "bfloat16"), ("float64", "float32"), ("float64", "float16")],
)
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("options", [{}, {"group": 3}, {"causal": True}, {"softcap": 2.0}])
def test_narrower_keys_are_converted(dtype: str, narrower: str, length: int, options: dict[str, Any]) -> None:
    case = Plan(dtype=dtype, query_length=length, **options).case(9)
    call = call_of(case, return_lse=True)
    key, value = (tensor(part.astype(DTYPES[narrower])) for part in (case.key, case.value))
    converted = replace(call, key=key.to(call.query.dtype), value=value.to(call.query.dtype))
    assert_same_results(run(replace(call, key=key, value=value)), run(converted))
