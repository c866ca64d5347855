"""Calls on tensors: the native kernel computes those that it can, wherever their elements lie, and others the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import accuracy
import pytest
import strategies
import torch
from binding import each_instructions
from cases import Case, Plan
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import array, call_of

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.kernels import AttentionCall
from attnserve_server.native.library import MAX_WIDTH, NAME, Library

Changed = Callable[[Case, AttentionCall], AttentionCall]
"""A call whose results are the same as those of another, which belongs to a case."""


@pytest.fixture(autouse=True, scope="module")
def _torch_threads() -> Iterator[None]:
    """Devices set torch's number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(call: AttentionCall, instructions: str) -> Any:
    """The result of a call on a CPU with the native kernel, as arrays."""
    device = CpuDevice(1, 0, Library(instructions))
    try:
        (result,) = device.attend([call], 0)
    finally:
        device.close()
    lse, scores = (None if part is None else array(part) for part in (result.lse, result.scores))
    return SimpleNamespace(output=array(result.output), lse=lse, scores=scores, kernel=result.kernel)


@each_instructions
@given(
    plan=strategies.plans(dense=True),
    seed=strategies.SEEDS,
    return_lse=st.booleans(),
    stage=st.sampled_from([None, None, "weights", "raw"]),
)
def test_random_calls(instructions: str, plan: Plan, seed: int, return_lse: bool, stage: str | None) -> None:
    case = plan.case(seed)
    call = call_of(case, return_lse=return_lse, return_scores=stage)
    accuracy.check(case, run(call, instructions), stage)


def as_it_is(_: Case, call: AttentionCall) -> AttentionCall:
    """The call itself."""
    return call


def elements_apart(*names: str) -> Changed:
    """Between the elements of a row of these tensors lie those of all others."""

    def changed(_: Case, call: AttentionCall) -> AttentionCall:
        tensors = {name: getattr(call, name).transpose(2, 3).contiguous().transpose(2, 3) for name in names}
        assert all(tensor.stride(3) > 1 for tensor in tensors.values())
        return replace(call, **tensors)

    return changed


def half(case: Case, call: AttentionCall) -> AttentionCall:
    """Keys and values are float16, queries are not."""
    key, value = call.key.half(), call.value.half()
    case.key[...], case.value[...] = array(key), array(value)
    return replace(call, key=key, value=value)


@each_instructions
@pytest.mark.parametrize(
    ("plan", "changed", "ours"),
    [
        pytest.param(Plan(mask_shape=(5, 7), bias_shape=(5, 7)), elements_apart("mask", "bias"), True, id="mask, bias"),
        pytest.param(Plan(), elements_apart("query"), False, id="query"),
        pytest.param(Plan(), elements_apart("key"), False, id="key"),
        pytest.param(Plan(), elements_apart("value"), False, id="value"),
        pytest.param(Plan(), half, True, id="half"),
        # Where only distant keys are left, float32 does not suffice.
        pytest.param(Plan(alibi=True, mask_shape=(5, 7)), as_it_is, False, id="mask, ALiBi"),
        pytest.param(Plan(alibi=True, bias_shape=(5, 7)), as_it_is, False, id="bias, ALiBi"),
        pytest.param(Plan(value_dim=MAX_WIDTH + 8), as_it_is, False, id="wide value"),
        pytest.param(Plan(value_dim=MAX_WIDTH), as_it_is, True, id="widest value"),
    ],
)
def test_calls_at_the_edge(instructions: str, plan: Plan, changed: Changed, ours: bool) -> None:
    case = plan.case(0)
    result = run(changed(case, call_of(case, return_lse=True)), instructions)
    assert (result.kernel == NAME) == ours
    accuracy.check(case, result)
