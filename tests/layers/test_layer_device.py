"""Layers whose weights are in memory that the host cannot read, such as a CUDA device's."""

from __future__ import annotations

from typing import Any

import pytest
import random_layers as make
import torch
from meta_device import CUDA, META, SEVEN, MetaTransfers, NothingWaits, hollow, hollow_device

from attnserve_server.devices.results import ReplyTensors
from attnserve_server.kernels import efficient_cuda
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.request import run_layer
from attnserve_server.layers.specification import Architecture, Rotary, Transformer


class Asked:
    """A request that replies with the layer's output."""

    def __init__(self, given: LayerInput) -> None:
        self.input = given

    def arranged(self, output: LayerOutput) -> ReplyTensors:
        return output.output, output.lse, output.scores


@pytest.mark.parametrize("where", [META, CUDA], ids=str)
@pytest.mark.parametrize(
    "architecture",
    [
        make.attention(32, 4, causal=True),
        Transformer(blocks=2, block=make.block(32, 4, self_attention=make.attention(32, 4, causal=True))),
        make.attention(32, 4, causal=True, rotary=Rotary(width=8, base=1e4)),
    ],
    ids=["attention", "transformer", "rotary"],
)
def test_what_a_layer_takes_and_gives(
    where: torch.device, architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = hollow_device(where, monkeypatch)
    lengths = (5, 9, 5)
    requests: list[Any] = [Asked(make.packed(make.random_rows(length, 32, 0))) for length in lengths]
    with hollow(where):
        parameters = {name: each.to(where) for name, each in make.random_parameters(architecture).items()}
        layer = make.layer_of(architecture, parameters, device)
        with NothingWaits(where):
            batch = run_layer(device, requests, lambda inputs: device.share(layer.run, inputs, lengths))
    for length, result in zip(lengths, batch.results, strict=True):
        assert torch.frombuffer(result.output, dtype=torch.float32).tolist() == [SEVEN] * (length * 32)
    transfers = device._transfers
    assert isinstance(transfers, MetaTransfers)
    assert transfers.waits == 2, "once for whether all inputs of all attentions were finite, and once for all replies"
    assert all(each.data_ptr() in transfers.allocated for each in transfers.uploaded), "from pinned memory"
    assert set(batch.kernel_calls) == {efficient_cuda.NAME}
    assert batch.padding == 13 / 32, "19 rows are filled up to 32"
