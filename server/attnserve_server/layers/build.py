"""From a specification and its parameters to the layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.layers.attention_layer import AttentionLayer
from attnserve_server.layers.layer import Layer
from attnserve_server.layers.specification import LayerSpecification, Transformer
from attnserve_server.layers.transformer import TransformerLayer


def build_layer(specification: LayerSpecification, parameters: Mapping[str, torch.Tensor], compute: Compute) -> Layer:
    """The layer that a specification describes, of parameters by their canonical names, in its dtype on the device.

    It keeps what it needs of the parameters, some of them joined: whoever holds the others may let go of them.
    """
    architecture = specification.architecture
    with torch.inference_mode():
        if isinstance(architecture, Transformer):
            return TransformerLayer(specification, architecture, parameters, compute)
        return AttentionLayer(specification, architecture, parameters, compute)
