"""Which results a kernel call has: those that were asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from cases import Plan
from kernel_calls import call_of

from attnserve_server.kernels import AttentionResult, attend, excluded_score, flash_cpu, widened, written_out
from attnserve_server.requests.options import ScoreStage

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, flash_cpu.NAME),
    ({"causal": True, "query_length": 100, "key_length": 100}, flash_cpu.NAME),
    ({"sinks": True, "mask_shape": (5, 7)}, flash_cpu.NAME),
    ({"window": (0, 0), "query_offset": 50}, flash_cpu.NAME),
    ({"window": (2, 2), "query_length": 600, "key_length": 300}, flash_cpu.NAME),
    ({"alibi": True}, flash_cpu.NAME),
    ({"alibi": True, "mask_shape": (5, 7)}, written_out.NAME),
    ({"alibi": True, "bias_shape": (5, 7)}, written_out.NAME),
    ({"softcap": 2.0}, written_out.NAME),
    ({"query_length": 1, "key_length": 1}, flash_cpu.NAME),
    ({"query_length": 1, "dtype": "bfloat16"}, flash_cpu.NAME),
    ({"query_length": 1, "dtype": "float16", "sinks": True}, flash_cpu.NAME),
    ({"query_length": 0}, "none"),
    ({"key_length": 0, "sinks": True}, "none"),
]


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("options", "kernel"), CASES, ids=str)
def test_an_lse_is_there_if_it_was_asked_for(options: dict[str, Any], kernel: str, lse: bool, finite: bool) -> None:
    call = replace(call_of(Plan(**options).case(0), return_lse=lse), finite=finite)
    result = attend(call)
    assert result.kernel == kernel
    assert result.scores is None
    assert result.output.dtype == call.query.dtype
    assert (result.lse is not None) == lse
    assert result.lse is None or result.lse.shape == call.query.shape[:3]


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("lengths", [(0, 7), (5, 0), (5, 7)])
def test_scores_are_there_if_they_were_asked_for(lengths: tuple[int, int], lse: bool) -> None:
    plan = Plan(query_length=lengths[0], key_length=lengths[1])
    result = attend(call_of(plan.case(0), return_lse=lse, return_scores="masked"))
    assert result.kernel == written_out.NAME
    assert (result.lse is not None) == lse
    assert result.scores is not None
    assert result.scores.shape[2:] == lengths


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("asked", [False, True])
def test_results_of_parts_are_joined(axis: int, asked: bool) -> None:
    """Of sequences, heads or queries: what is suspect in a part of a sequence is suspect in all of it."""
    output, lse, scores = torch.randn(2, 2, 2, 4), torch.randn(2, 2, 2), torch.randn(2, 2, 2, 3)
    suspect = torch.tensor([[False, True], [False, False]])
    parts = [
        AttentionResult(
            output.narrow(axis, n, 1),
            lse.narrow(axis, n, 1) if asked else None,
            scores.narrow(axis, n, 1) if asked else None,
            "some",
            (suspect[0, n : n + 1] if axis == 0 else suspect[n]) if asked else None,
        )
        for n in (0, 1)
    ]
    joined = AttentionResult.joined(parts, axis)
    assert torch.equal(joined.output, output)
    assert joined.kernel == "some"
    if asked:
        assert joined.lse is not None
        assert torch.equal(joined.lse, lse)
        assert joined.scores is not None
        assert torch.equal(joined.scores, scores)
        assert joined.suspect is not None
        assert joined.suspect.tolist() == [False, True]
    else:
        assert joined.lse is joined.scores is joined.suspect is None
    assert AttentionResult.joined(parts[:1], axis) is parts[0]


@pytest.mark.parametrize("stage", get_args(ScoreStage))
def test_scores_over_more_keys_exclude_them(stage: ScoreStage) -> None:
    scores = torch.arange(6.0).view(2, 3)
    nothing = 0.0 if stage == "weights" else -torch.inf
    assert excluded_score(stage) == nothing
    assert torch.equal(widened(scores, 5, stage), torch.cat([scores, torch.full((2, 2), nothing)], 1))
    assert torch.equal(widened(scores, 3, stage), scores)
