"""Layers whose weights are in memory that the host cannot read, as that of a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import random_layers as make
import torch
from meta_device import META, SEVEN, MetaTransfers, NothingWaits, meta_device

from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.devices.results import Parts
from attnserve_server.kernels import efficient_cuda
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.request import run_layer
from attnserve_server.layers.specification import Architecture, Rotary, Transformer

__all__ = ["meta_device"]


class Asked:
    """A request whose reply has what the layer gives."""

    def __init__(self, given: LayerInput) -> None:
        self.input = given

    def arranged(self, output: LayerOutput) -> Parts:
        return output.output, output.lse, output.scores


@pytest.mark.parametrize(
    "architecture",
    [
        make.attention(32, 4, causal=True),
        Transformer(blocks=2, block=make.block(32, 4, self_attention=make.attention(32, 4, causal=True))),
        make.attention(32, 4, causal=True, rotary=Rotary(width=8)),
    ],
    ids=["attention", "transformer", "rotary"],
)
def test_what_a_layer_takes_and_gives(meta_device: CudaDevice, architecture: Architecture) -> None:
    parameters = {name: each.to(META) for name, each in make.random_parameters(architecture).items()}
    device: Any = meta_device
    layer = make.layer_of(architecture, parameters, device)
    lengths = (5, 9, 5)
    requests: list[Any] = [Asked(make.packed(make.random_rows(length, 32, 0))) for length in lengths]
    with NothingWaits():
        batch = run_layer(meta_device, requests, layer.run)
    for length, result in zip(lengths, batch.results, strict=True):
        assert torch.frombuffer(result.output, dtype=torch.float32).tolist() == [SEVEN] * (length * 32)
    transfers = meta_device._transfers
    assert isinstance(transfers, MetaTransfers)
    attentions = 2 if isinstance(architecture, Transformer) else 1
    assert transfers.waits == attentions + 1, "once for each, of whatever lengths, and once for all replies together"
    assert set(batch.kernel_calls) == {efficient_cuda.NAME}
