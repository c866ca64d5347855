"""What is kept of a batch of layers while a reply waits to be sent: its own results, not those of others."""

from __future__ import annotations

from typing import Any

import random_layers as make
from kept import kept_bytes

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


def test_a_caller_slow_to_receive_a_reply_does_not_hold_those_of_others() -> None:
    device, width = CpuDevice(1, 10**9, None), 32
    architecture = make.attention(width, 4, causal=True)
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    requests: list[Any] = [Asked(make.packed(make.random_rows(length, width, 0))) for length in (1, 512)]
    results = run_layer(device, requests, layer.run).results
    assert [len(result.output) for result in results] == [4 * width, 4 * width * 512]
    assert all(kept_bytes(result.output) <= 2 * len(result.output) for result in results)
