"""Requests that a layer refuses before anything runs, by the name of the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import random_layers as make
import torch

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import InvalidRequest
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
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    (reply,) = make.run(layer, request)
    assert len(reply.output) == len(request.input)
    assert reply.output.isfinite().all()


def options(request: LayerInput, **fields: Any) -> LayerInput:
    return replace(request, options=LayerOptions(**fields))


BAD: list[tuple[Architecture, LayerInput, str, str]] = [
    (SELF, replace(ROWS, input=torch.zeros(7, 31)), "input.shape", "rows of width 32, found [7, 31]"),
    (SELF, replace(ROWS, input=torch.zeros(7, 32, dtype=torch.float64)), "input.dtype", "float32, found float64"),
    (SELF, replace(IDS), "input.shape", "rows of width 32, found [7]"),
    (SELF, replace(ROWS, lengths=[3, 5]), "lengths", "sum to 7, found 8"),
    (SELF, replace(ROWS, lengths=[-1, 8]), "lengths", "no negative lengths, found -1"),
    (SELF, replace(WITH_OWN_WIDTH, context=torch.zeros(5, 30)), "context.shape", "rows of width 32"),
    (SELF, replace(WITH_OWN_WIDTH, context_lengths=[5]), "context_lengths", "2 sequences, found 1"),
    (SELF, replace(WITH_OWN_WIDTH, context_lengths=[5, 1]), "context_lengths", "sum to 5, found 6"),
    (SELF, replace(WITH_OWN_WIDTH, context_lengths=None), "context_lengths", "neither"),
    (SELF, replace(ROWS, offsets=[1]), "query_offset", "2 offsets, found 1"),
    (SELF, replace(ROWS, offsets=[1, 1 << 41]), "query_offset[1]", "from -2**40 to 2**40"),
    (SELF, replace(ROWS, mask=torch.ones(2, 4, 4, 5, dtype=torch.bool)), "mask.shape", "broadcasts to [2, 4, 4, 4]"),
    (SELF, replace(ROWS, bias=torch.ones(4, 4)), "bias.shape", "broadcasts to [2, 4, 4, 4]"),
    (SELF, replace(ROWS, segments=torch.ones(7, dtype=torch.int64)), "segments", "no segments"),
    (SELF, options(ROWS, average_scores=True), "average_scores", "return_scores"),
    (CROSSED, ROWS, "context", "a context of width 20, found none"),
    (ADDITIVE, replace(ROWS, mask=torch.ones(1, 2, 1, 1, dtype=torch.bool)), "mask.shape", "[2, 1, 4, 4]"),
    (ENCODER, ROWS, "input.dtype", "int64, found float32"),
    (ENCODER, replace(IDS, input=torch.arange(44, 51)), "input", "ids from 0 to 49, found 50"),
    (ENCODER, replace(IDS, input=torch.arange(-1, 6)), "input", "ids from 0 to 49, found -1"),
    (ENCODER, replace(IDS, input=torch.zeros(15).long(), lengths=[15]), "input", "from -2 to 13, found 0 to 14"),
    (ENCODER, replace(IDS, offsets=[0, 11]), "query_offset", "positions from -2 to 13, found 11 to 14"),
    (ENCODER, replace(IDS, offsets=[-3, 0]), "query_offset", "positions from -2 to 13, found -3 to -1"),
    (ENCODER, replace(IDS, segments=torch.full((7,), 2)), "segments", "ids from 0 to 1, found 2"),
    (ENCODER, replace(IDS, segments=torch.zeros(6, dtype=torch.int64)), "segments", "7 segments, found 6"),
    (ENCODER, replace(IDS, context=torch.zeros(5, 32), context_lengths=[2, 3]), "context", "no cross-attention"),
    (PLAIN, replace(ROWS, segments=torch.zeros(7, dtype=torch.int64)), "segments", "no segments"),
    (PLAIN, replace(ROWS, bias=torch.zeros(1, 1, 4, 4)), "bias", "a transformer's blocks define it"),
    (PLAIN, options(ROWS, causal=False), "causal", "a transformer's blocks define it"),
    (PLAIN, options(ROWS, window=(-1, -1)), "window", "a transformer's blocks define it"),
    (PLAIN, options(ROWS, return_lse=True), "return_lse", "a transformer returns its output alone"),
    (PLAIN, options(ROWS, return_scores="weights"), "return_scores", "a transformer returns its output alone"),
    (DECODER, ROWS, "context", "a context of width 32, found none"),
    (DECODER, WITH_CONTEXT, "context.shape", "rows of width 32"),
    (DECODER, replace(WITH_OWN_WIDTH, mask=torch.ones(2, 4, 4, 3, dtype=torch.bool)), "mask.shape", "[2, 4, 4, 4]"),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(BAD)))
def test_what_does_not_fit_is_refused_by_name(device: CpuDevice, place: int) -> None:
    architecture, request, field, description = BAD[place]
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    with pytest.raises(InvalidRequest) as caught:
        layer.check(request)
    assert caught.value.field == field
    assert description in caught.value.description
