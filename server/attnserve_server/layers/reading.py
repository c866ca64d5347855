"""The contents of a request to apply a layer: read out of the received message, into memory of its own.

In: the layer, what the header states, and payloads that lie in the message. Out: a `LayerInput`, packed, in the layer's
dtype; InvalidRequest where lengths, offsets, widths or masks make no sense.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnserve import _dtypes
from attnserve.v1 import tensor_pb2
from attnserve_server.devices.staging import TORCH, in_range
from attnserve_server.errors import InvalidRequest
from attnserve_server.layers.application import Application, check_masks
from attnserve_server.layers.checks import check_asked
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.registry import Loaded
from attnserve_server.limits import RequestLimits
from attnserve_server.options import check_offset
from attnserve_server.tensors import read_integers


def read_input(
    loaded: Loaded, application: Application, payloads: list[memoryview], limits: RequestLimits
) -> LayerInput:
    """What goes into the layer. A mask over what caches have is left out: see `read_mask`."""
    specification, layer = loaded.specification, loaded.outline
    check_asked(specification.architecture, application.options, application.tensors)
    if application.takes_ids != bool(layer.vocabulary):
        found = _dtypes.name(application.tensors["input"].dtype)
        raise InvalidRequest("input.dtype", "int64 token ids" if layer.vocabulary else "a floating dtype", found)
    if not application.takes_ids:
        _check_width("input", application, layer.input_width)
    if application.context_length is not None:
        _check_width("context", application, layer.context_width)
    given = _read_lengths(application, payloads)
    dtype = getattr(torch, specification.dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    lengths, context_lengths, offsets = given
    limits.check_flops(loaded.layer.flops(lengths, context_lengths, application.options) * loaded.weight)
    own_keys = specification.kind == "transformer"
    keys = lengths if context_lengths is None or own_keys else context_lengths
    read = _Reader(application, payloads)
    mask = bias = None
    if not application.resident:
        longest = application.length if application.batched else max(lengths, default=0)
        longest_keys = max(keys, default=0)
        if application.batched:
            longest_keys = application.length if own_keys else application.keys
        check_masks(application, layer.query_heads, longest, longest_keys)
        if lengths:
            mask = read.broadcast("mask", max(lengths), max(keys), torch.bool)
    if lengths:
        bias = read.broadcast("bias", max(lengths), max(keys), exact)
    return LayerInput(
        input=read.rows("input", lengths, None if application.takes_ids else dtype),
        lengths=lengths,
        context=None if context_lengths is None else read.rows("context", context_lengths, dtype),
        context_lengths=context_lengths,
        offsets=offsets,
        mask=mask,
        bias=bias,
        segments=read.rows("segments", lengths, None) if "segments" in application.tensors else None,
        options=application.options,
    )


def read_mask(application: Application, payloads: list[memoryview]) -> torch.Tensor | None:
    """The mask, bool and of rank 4, over keys of which it is not known yet how many there are."""
    mask = _Reader(application, payloads).of_rank_4("mask")
    return None if mask is None else mask != 0


def _read_lengths(
    application: Application, payloads: list[memoryview]
) -> tuple[list[int], list[int] | None, list[int] | None]:
    """Lengths, context lengths and offsets, one a sequence. Raises InvalidRequest if contents make no sense."""
    tensors = application.tensors

    def lengths(name: str, rows: int) -> list[int]:
        given = read_integers(tensors.get(name), payloads)
        if given is None:
            return [rows] * (0 if application.empty else application.batch)
        for index, length in enumerate(given):
            if not 0 <= length <= rows:
                raise InvalidRequest(f"{name}[{index}]", f"from 0 to {rows}", length)
        if application.packed and sum(given) != rows:
            raise InvalidRequest(name, f"a sum of {rows}, the total of the packed tensor", sum(given))
        return list(given)

    context = application.context_length
    own = lengths("lengths", application.length)
    context_lengths = None if context is None else lengths("context_lengths", context)
    offsets = read_integers(tensors.get("query_offset"), payloads)
    each = None
    if offsets is not None:
        each = [check_offset(index, offset) for index, offset in enumerate(offsets)]
        if len(each) == 1:
            each *= len(own)
    if application.empty:
        return [], None if context is None else [], None
    return own, context_lengths, each


class _Reader:
    """Reads tensors out of a received message, into memory of their own."""

    def __init__(self, application: Application, payloads: list[memoryview]) -> None:
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
        """The rows of all sequences end to end; of padded ones, those that count."""
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
        """Mask or bias, of rank 4, of the longest sequences that there are."""
        tensor = self.of_rank_4(name)
        if tensor is None:
            return None
        if tensor.shape[2] > 1:
            tensor = tensor[:, :, :length]
        if tensor.shape[3] > 1:
            tensor = tensor[..., :keys]
        return tensor != 0 if dtype == torch.bool else in_range(tensor, dtype)


def _check_width(name: str, application: Application, width: int) -> None:
    shape = application.tensors[name].shape
    if width == 0:
        raise InvalidRequest(name, "none, for the layer takes none", f"shape {list(shape)}")
    if shape[-1] != width:
        raise InvalidRequest(f"{name}.shape", f"rows of width {width}, as the layer has it", f"shape {list(shape)}")
