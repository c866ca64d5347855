"""From a specification and its parameters to the layer."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.layers.attention_layer import AttentionLayer
from attnserve_server.layers.layer import Layer
from attnserve_server.layers.specification import LayerSpecification, Transformer
from attnserve_server.layers.transformer import TransformerLayer


def build_layer(
    specification: LayerSpecification, parameters: MutableMapping[str, torch.Tensor], compute: Compute
) -> Layer:
    """The layer that a specification describes, from parameters by canonical name, in its dtype, on the device.

    Weights are removed from `parameters` one by one: many are kept in another form, and so only a few at a time exist
    twice.
    """
    architecture = specification.architecture
    with torch.inference_mode():
        if isinstance(architecture, Transformer):
            return TransformerLayer(specification, architecture, parameters, compute)
        return AttentionLayer(specification, architecture, parameters, compute)
