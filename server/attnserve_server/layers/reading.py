"""The rows of a request to apply a layer, copied from the received message into memory of their own.

In: the layer, what the header states, the lengths of sequences, and payloads in the message. Out: a `LayerInput`,
packed, in the layer's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnserve.v1 import tensor_pb2
from attnserve_server.devices.staging import TORCH, in_range
from attnserve_server.kernels import accumulation_dtype
from attnserve_server.layers.application import Application
from attnserve_server.layers.extent import LayerExtent
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.specification import LayerSpecification


def read_input(
    specification: LayerSpecification, application: Application, extent: LayerExtent, payloads: Sequence[memoryview]
) -> LayerInput:
    """The input of the layer, without a mask over cached keys: see `read_mask`."""
    lengths, context_lengths = extent.lengths, extent.context_lengths
    dtype = getattr(torch, specification.dtype)
    exact = accumulation_dtype(dtype)
    own_keys = specification.kind == "transformer"
    keys = lengths if context_lengths is None or own_keys else context_lengths
    read = _Reader(application, payloads)
    mask = bias = None
    if lengths:
        if not application.resident:
            mask = read.broadcast("mask", max(lengths), max(keys), torch.bool)
        bias = read.broadcast("bias", max(lengths), max(keys), exact)
    return LayerInput(
        input=read.rows("input", lengths, None if application.takes_ids else dtype),
        lengths=lengths,
        context=None if context_lengths is None else read.rows("context", context_lengths, dtype),
        context_lengths=context_lengths,
        offsets=extent.offsets,
        mask=mask,
        bias=bias,
        segments=read.rows("segments", lengths, None) if "segments" in application.tensors else None,
        options=application.options,
    )


def read_mask(application: Application, payloads: Sequence[memoryview]) -> torch.Tensor | None:
    """The mask, bool and of rank 4, over a number of keys that is not known yet."""
    mask = _Reader(application, payloads).of_rank_4("mask")
    return None if mask is None else mask != 0


class _Reader:
    """Copies tensors from a received message into memory of their own."""

    def __init__(self, application: Application, payloads: Sequence[memoryview]) -> None:
        self._application = application
        self._payloads = payloads

    def _tensor(self, name: str) -> torch.Tensor:
        spec = self._application.tensors[name]
        raw = torch.empty(spec.size, dtype=torch.uint8)
        if spec.payload >= 0:
            memoryview(raw.numpy())[:] = self._payloads[spec.payload]  # type: ignore[arg-type]
        dtype = torch.int64 if spec.dtype == tensor_pb2.DATA_TYPE_INT64 else TORCH[spec.dtype]
        return raw.view(dtype).view(spec.shape)

    def rows(self, name: str, lengths: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
        """The rows of all sequences end to end, without padding."""
        tensor = self._tensor(name)
        if self._application.batched:
            if any(length != tensor.shape[1] for length in lengths):
                tensor = torch.cat([tensor[index, :length] for index, length in enumerate(lengths)])
            else:
                tensor = tensor.flatten(0, 1)
        return tensor if dtype is None else tensor.to(dtype)

    def of_rank_4(self, name: str) -> torch.Tensor | None:
        """Mask or bias."""
        spec = self._application.tensors.get(name)
        return None if spec is None else self._tensor(name).view((1,) * (4 - len(spec.shape)) + spec.shape)

    def broadcast(self, name: str, length: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Mask or bias of rank 4, cut to the longest sequences."""
        tensor = self.of_rank_4(name)
        if tensor is None:
            return None
        if tensor.shape[2] > 1:
            tensor = tensor[:, :, :length]
        if tensor.shape[3] > 1:
            tensor = tensor[..., :keys]
        return tensor != 0 if dtype == torch.bool else in_range(tensor, dtype)
