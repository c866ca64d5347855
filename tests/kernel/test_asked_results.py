"""Which results a kernel call has: those that were asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from cases import Plan
from kernel_calls import call_of

from attnserve_server.kernels import attend, excluded_score, flash_cpu, widened, written_out
from attnserve_server.requests.options import ScoreStage

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, flash_cpu.NAME),
    ({"causal": True, "query_length": 100, "key_length": 100}, flash_cpu.NAME),
    ({"sinks": True, "mask_shape": (5, 7)}, flash_cpu.NAME),
    ({"window": (0, 0), "query_offset": 50}, flash_cpu.NAME),
    ({"window": (2, 2), "query_length": 600, "key_length": 300}, flash_cpu.NAME),
    ({"softcap": 2.0}, written_out.NAME),
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


@pytest.mark.parametrize("stage", get_args(ScoreStage))
def test_scores_over_more_keys_exclude_them(stage: ScoreStage) -> None:
    scores = torch.arange(6.0).view(2, 3)
    nothing = 0.0 if stage == "weights" else -torch.inf
    assert excluded_score(stage) == nothing
    assert torch.equal(widened(scores, 5, stage), torch.cat([scores, torch.full((2, 2), nothing)], 1))
    assert torch.equal(widened(scores, 3, stage), scores)
