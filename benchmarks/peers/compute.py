"""What the peers compute, with torch: the same functions as the service, for as many requests at once as possible.

Imported by the peers' servers, in virtual environments of their own: it needs torch and NumPy, but not attnserve. Torch
in process computes so, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

HEADS, HEAD_DIM = 8, 64


class Attention(NamedTuple):
    """One attention: query [Hq, L, D], key and value [Hk, S, D], a mask [L, S], true where a key is attended to."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float | None

    @property
    def alike(self) -> object:
        """What requests must have in common to be stacked."""
        return self.query.shape, self.key.shape, self.value.shape, self.mask is None, self.causal, self.scale


def attend(requests: Sequence[Attention]) -> list[torch.Tensor]:
    """The outputs [Hq, L, D], in order; requests with equal shapes and options are stacked for one call of torch."""
    groups: dict[object, list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(request.alike, []).append(place)
    outputs: dict[int, torch.Tensor] = {}
    for places in groups.values():
        group = [requests[place] for place in places]
        query = _stacked([request.query for request in group])
        key = _stacked([request.key for request in group])
        value = _stacked([request.value for request in group])
        masks = [request.mask for request in group if request.mask is not None]
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            _stacked(masks).unsqueeze(1) if masks else None,
            is_causal=group[0].causal,
            scale=group[0].scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.update(zip(places, output, strict=True))
    return [outputs[place] for place in range(len(requests))]


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors stacked along a new first axis; a single one becomes a view."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


class Layer:
    """A causal multi-head layer with weights from an npz file, by the names of nn.MultiheadAttention."""

    def __init__(self, file: str | Path) -> None:
        """Reads the weights."""
        with np.load(file) as arrays:
            self._weights = {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs [L, 512] of inputs of any lengths."""
        rows = inputs[0] if len(inputs) == 1 else torch.cat(list(inputs))
        return multi_head(self._weights, rows, [len(each) for each in inputs])


def multi_head(weights: Mapping[str, torch.Tensor], rows: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """The outputs of sequences that lie end to end in rows [total, 512]: projections over all rows; attention stacked
    if lengths are equal, else one by one.
    """
    projected = linear(rows, weights["in_proj_weight"], weights["in_proj_bias"])
    if len(set(lengths)) == 1:
        attended = _heads(projected.view(len(lengths), lengths[0], 3, HEADS, HEAD_DIM)).reshape(len(rows), -1)
    else:
        sequences = torch.split_with_sizes(projected.view(1, len(rows), 3, HEADS, HEAD_DIM), lengths, dim=1)
        attended = torch.cat([_heads(sequence)[0] for sequence in sequences]).view(len(rows), -1)
    output = linear(attended, weights["out_proj.weight"], weights["out_proj.bias"])
    return list(torch.split_with_sizes(output, lengths))


def _heads(projected: torch.Tensor) -> torch.Tensor:
    """[B, L, 3, H, D] to [B, L, H, D]."""
    query, key, value = projected.permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def prepare(threads: int) -> None:
    """Sets torch up for a server that only computes."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
