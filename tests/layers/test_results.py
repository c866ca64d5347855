"""What is kept of a batch of layers while a reply waits to be sent: its own results, not those of others."""

from __future__ import annotations

import gc
from typing import Any

import random_layers as make
import torch

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.devices.results import ReplyTensors
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.request import run_layer


class Asked:
    """A request that replies with the layer's output."""

    def __init__(self, given: LayerInput) -> None:
        self.input = given

    def arranged(self, output: LayerOutput) -> ReplyTensors:
        return output.output, output.lse, output.scores


def tensor_bytes() -> int:
    """The bytes of all tensors in memory; what several have in common counts once."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and not each.is_mkldnn]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_a_caller_slow_to_receive_a_reply_does_not_hold_those_of_others() -> None:
    device, width, long = CpuDevice(1, 10**9, None), 32, 512
    architecture = make.attention(width, 4, causal=True)
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    requests: list[Any] = [Asked(make.packed(make.random_rows(length, width, 0))) for length in (1, long)]
    results = run_layer(device, requests, layer.run).results
    expected = bytes(results[0].output)
    with_all = tensor_bytes()
    del results[1]
    assert tensor_bytes() <= with_all - 4 * width * long
    assert results[0].output == expected
