"""What a layer refuses before anything runs, by the name of the field; other errors are in `test_apply_errors`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import random_layers as make
import torch

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import InvalidRequest
from attnserve_server.layers.checks import check_asked, check_contents
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.specification import Architecture, Embedding, LearnedScore, Transformer


@pytest.fixture(scope="module")
def device(devices: dict[int, CpuDevice]) -> CpuDevice:
    return devices[1]


CROSSED = make.attention(32, 4, contexts=20)
SELF = make.attention(32, 4)
ADDITIVE = LearnedScore(score="additive", inputs=32, contexts=32, outputs=32, units=8)
ENCODER = Transformer(
    blocks=1,
    block=make.block(),
    embedding=Embedding(width=32, vocabulary=50, positions=16, position_offset=2, segments=2),
)
PLAIN = Transformer(blocks=1, block=make.block())
DECODER = Transformer(blocks=1, block=make.block(crossed=True))

ROWS = LayerInput(input=torch.zeros(7, 32), lengths=[3, 4])
WITH_CONTEXT = replace(ROWS, context=torch.zeros(5, 20), context_lengths=[0, 5])
WITH_OWN_WIDTH = replace(ROWS, context=torch.zeros(5, 32), context_lengths=[2, 3])
IDS = LayerInput(input=torch.arange(7), lengths=[3, 4])

GOOD: list[tuple[Architecture, LayerInput]] = [
    (SELF, ROWS),
    (SELF, WITH_OWN_WIDTH),
    (CROSSED, WITH_CONTEXT),
    (CROSSED, replace(WITH_CONTEXT, mask=torch.ones(2, 4, 4, 5, dtype=torch.bool), bias=torch.ones(1, 1, 1, 5))),
    (ADDITIVE, replace(ROWS, mask=torch.ones(2, 1, 4, 4, dtype=torch.bool))),
    (ENCODER, IDS),
    (ENCODER, replace(IDS, offsets=[-2, 10], segments=torch.ones(7, dtype=torch.int64))),
    (ENCODER, LayerInput(input=torch.zeros(0, dtype=torch.int64), lengths=[0], offsets=[99])),
    (DECODER, WITH_OWN_WIDTH),
    (PLAIN, replace(ROWS, offsets=[1 << 40, -5], mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))),
]


@pytest.mark.parametrize("place", range(len(GOOD)))
def test_what_fits_runs(device: CpuDevice, place: int) -> None:
    architecture, request = GOOD[place]
    given = {name for name in ("context", "mask", "bias", "segments") if getattr(request, name) is not None}
    check_asked(architecture, request.options, given)
    check_contents(architecture, request)
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    (reply,) = make.run(layer, request)
    assert len(reply.output) == len(request.input)
    assert reply.output.isfinite().all()


ASKED: list[tuple[Architecture, dict[str, Any], set[str], str, str]] = [
    (SELF, {}, {"segments"}, "segments", "no segments"),
    (SELF, {"average_scores": True}, set(), "average_scores", "return_scores"),
    (CROSSED, {}, set(), "context", "a context of width 20, found none"),
    (ENCODER, {}, {"context"}, "context", "no cross-attention"),
    (PLAIN, {}, {"segments"}, "segments", "no segments"),
    (PLAIN, {}, {"bias"}, "bias", "a transformer's blocks define it"),
    (PLAIN, {"causal": False}, set(), "causal", "a transformer's blocks define it"),
    (PLAIN, {"window": (-1, -1)}, set(), "window", "a transformer's blocks define it"),
    (PLAIN, {"return_lse": True}, set(), "return_lse", "a transformer returns its output alone"),
    (PLAIN, {"return_scores": "weights"}, set(), "return_scores", "a transformer returns its output alone"),
    (PLAIN, {"average_scores": True}, set(), "average_scores", "a transformer returns its output alone"),
    (DECODER, {}, set(), "context", "a context of width 32, found none"),
]


@pytest.mark.parametrize(("architecture", "options", "given", "field", "description"), ASKED)
def test_what_a_layer_does_not_support_is_refused_by_name(
    architecture: Architecture, options: dict[str, Any], given: set[str], field: str, description: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_asked(architecture, LayerOptions(**options), given)
    assert caught.value.field == field
    assert description in caught.value.description


CONTENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": torch.arange(44, 51)}, "input", "ids from 0 to 49, found 50"),
    ({"input": torch.arange(-1, 6)}, "input", "ids from 0 to 49, found -1"),
    ({"input": torch.zeros(15).long(), "lengths": [15]}, "input", "from -2 to 13, found 0 to 14"),
    ({"offsets": [0, 11]}, "query_offset", "positions from -2 to 13, found 11 to 14"),
    ({"offsets": [-3, 0]}, "query_offset", "positions from -2 to 13, found -3 to -1"),
    ({"segments": torch.full((7,), 2)}, "segments", "ids from 0 to 1, found 2"),
    ({"segments": torch.full((7,), -1)}, "segments", "ids from 0 to 1, found -1"),
]


@pytest.mark.parametrize(("fields", "field", "description"), CONTENTS)
def test_what_is_beyond_a_table_is_refused_by_name(fields: dict[str, Any], field: str, description: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_contents(ENCODER, replace(IDS, **fields))
    assert caught.value.field == field
    assert description in caught.value.description
