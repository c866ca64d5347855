"""One application of a loaded layer, from its bytes to its reply.

Inputs are copied out of the received message when it is read, packed, in the layer's dtype: the layer can look at them
(token ids must be in its vocabulary) before the request is admitted, and the message is let go of.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

import torch
from google.protobuf.message import DecodeError

from attnserve import _dtypes, _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.devices.staging import TORCH
from attnserve_server.errors import InvalidRequest, Malformed
from attnserve_server.layers.application import Application, application_of, check_masks
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.outline import Outline
from attnserve_server.layers.registry import Loaded, Registry
from attnserve_server.options import check_offset
from attnserve_server.reply import ReplyTensor, payloads_of, tensors_header, timings_of
from attnserve_server.request import CALL_COST, MAX_KNOWN_HEADER
from attnserve_server.tensors import read_integers
from attnserve_server.work import BatchResult, Independent, Phases, RequestResult

if TYPE_CHECKING:
    from attnserve_server.devices import Device

WIRE = {dtype: value for value, dtype in TORCH.items() if dtype != torch.uint8}
"""The wire's dtype of each floating dtype of torch."""

_known = lru_cache(maxsize=4096)(application_of)


@dataclass(slots=True)
class LayerRequest(Independent):
    """An application that has been checked against its layer; it keeps the layer alive."""

    reply_field: ClassVar[int] = pb.AttendStreamReply.APPLY_FIELD_NUMBER

    loaded: Loaded
    application: Application
    input: LayerInput
    flops: int
    received_bytes: int
    reply_bytes: int

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.loaded.name

    @property
    def group(self) -> Hashable:
        """Requests for one version of one layer share batches."""
        return self.loaded

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.application.priority

    @property
    def cost(self) -> int:
        """What it costs to compute, in FLOPs: those that it asks for, and what its kernel calls cost besides."""
        attentions = max(1, self.loaded.outline.blocks)
        return self.flops + CALL_COST * attentions * len(self.input.lengths)

    @property
    def query_tokens(self) -> int:
        """Rows of input, over all sequences."""
        return sum(self.input.lengths)

    def run_batch(self, device: Device, batch: Sequence[LayerRequest]) -> BatchResult:
        """Computes requests for this layer."""
        begin = perf_counter()
        inputs = [_on_device(request.input, device.torch_device) for request in batch]
        after_staging = perf_counter()
        outputs = self.loaded.layer.run(inputs)
        after_compute = perf_counter()
        return BatchResult(
            results=[request.collect(output) for request, output in zip(batch, outputs, strict=True)],
            staging=after_staging - begin,
            compute=after_compute - after_staging,
            fetch=perf_counter() - after_compute,
            kernel_calls=device.take_kernel_calls(),
        )

    def collect(self, output: LayerOutput) -> RequestResult:
        """The elements of the reply, on the host and laid out as the input was."""
        application, lengths = self.application, self.input.lengths
        dtype = output.output.dtype if application.takes_ids else TORCH[application.tensors["input"].dtype]
        rows, lse, scores = output.output.to(dtype), output.lse, output.scores
        if scores is not None:
            scores = scores.to(dtype)
        if application.batched:
            rows = _padded(rows, lengths, application.length, 0.0)
            if lse is not None:
                lse = _padded(lse.mT, lengths, application.length, -torch.inf).mT
            if scores is not None:
                excluded = 0.0 if application.options.return_scores == "weights" else -torch.inf
                per_row = scores.movedim(-2, 0)  # [total, (Hq,) S]
                missing = _keys(application) - per_row.shape[-1]
                per_row = torch.nn.functional.pad(per_row, (0, missing), value=excluded)
                scores = _padded(per_row, lengths, application.length, excluded).movedim(1, -2)
        parts = (None if part is None else _bytes(part) for part in (lse, scores))
        return RequestResult(_bytes(rows), *parts)

    def encode(self, result: RequestResult, phases: Phases, batch_size: int) -> tuple[list[_wire.Buffer], int]:
        """The pieces of the encoded ApplyResponse, and their length together."""
        application, specification = self.application, self.loaded.specification
        dtype = application.tensors["input"].dtype
        if application.takes_ids:
            dtype = WIRE[getattr(torch, specification.dtype)]
        layer = self.loaded.outline
        batch = [application.batch] if application.batched else []
        per_head = (*batch, layer.query_heads, application.length)
        tensors = [("output", dtype, (*batch, application.length, layer.output_width))]
        if result.lse is not None:
            double = specification.dtype == "float64"
            tensors.append(("lse", tensor_pb2.DATA_TYPE_FLOAT64 if double else tensor_pb2.DATA_TYPE_FLOAT32, per_head))
        if result.scores is not None:
            keys = _keys(application) if application.batched else _longest_keys(self.input)
            rows = (*batch, application.length) if application.options.average_scores else per_head
            tensors.append(("scores", dtype, (*rows, keys)))
        # Apart, because they differ each time: the rest is the same for all replies of these shapes.
        timings = pb.ApplyResponse(
            timings=timings_of(phases), batch_size=batch_size, layer_version=self.loaded.version
        ).SerializeToString()
        payloads = payloads_of(result)
        header = _tensors_header(tuple(tensors), tuple(map(len, payloads)))
        pieces, size = _wire.join(pb.ApplyResponse, header, payloads)
        return [timings, *pieces], len(timings) + size


@lru_cache(maxsize=1024)
def _tensors_header(tensors: tuple[ReplyTensor, ...], sizes: tuple[int, ...]) -> bytes:
    return tensors_header(pb.ApplyResponse, tensors, sizes)


def read_layer_request(registry: Registry, buffer: bytes, at: int = 0, end: int | None = None) -> LayerRequest:
    """The request that a part of a buffer holds, serialised. Raises InvalidRequest and NotFound."""
    if end is None:
        end = len(buffer)
    try:
        header, payloads = _wire.split(pb.ApplyRequest, buffer, at, end)
    except DecodeError as error:
        raise Malformed("", error) from None
    application = _known(header) if len(header) <= MAX_KNOWN_HEADER else application_of(header)
    loaded = registry.get(application.layer)
    specification = loaded.specification
    layer = loaded.outline
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
    keys = lengths if context_lengths is None or specification.kind == "transformer" else context_lengths
    longest = application.length if application.batched else max(lengths, default=0)
    longest_keys = max(keys, default=0)
    if application.batched:
        longest_keys = _keys(application) if specification.kind != "transformer" else application.length
    check_masks(application, layer.query_heads, longest, longest_keys)
    read = _Reader(application, payloads)
    request = LayerInput(
        input=read.rows("input", lengths, None if application.takes_ids else dtype),
        lengths=lengths,
        context=None if context_lengths is None else read.rows("context", context_lengths, dtype),
        context_lengths=context_lengths,
        offsets=offsets,
        mask=read.broadcast("mask", max(lengths), max(keys), torch.bool) if lengths else None,
        bias=read.broadcast("bias", max(lengths), max(keys), exact) if lengths else None,
        segments=read.rows("segments", lengths, None) if "segments" in application.tensors else None,
        options=application.options,
    )
    loaded.layer.check(request)
    return LayerRequest(
        loaded=loaded,
        application=application,
        input=request,
        flops=loaded.layer.flops(lengths, context_lengths, application.options),
        received_bytes=end - at,
        reply_bytes=_reply_bytes(application, layer, request),
    )


def _read_lengths(
    application: Application, payloads: list[memoryview]
) -> tuple[list[int], list[int] | None, list[int] | None]:
    """Lengths, context lengths and offsets, one a sequence. Raises InvalidRequest if contents make no sense."""
    tensors = application.tensors

    def lengths(name: str, rows: int) -> list[int]:
        given = read_integers(tensors.get(name), payloads)
        if given is None:
            return [rows] * (0 if _is_empty(application) else application.batch)
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
    if _is_empty(application):
        return [], None if context is None else [], None
    return own, context_lengths, each


def _is_empty(application: Application) -> bool:
    """Whether there is nothing to compute, however many sequences without rows a request says there are."""
    return application.batched and not application.length and not application.context_length


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

    def broadcast(self, name: str, length: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Mask or bias, of rank 4, of the longest sequences that there are."""
        spec = self._application.tensors.get(name)
        if spec is None:
            return None
        tensor = self._tensor(name).view((1,) * (4 - len(spec.shape)) + spec.shape)
        if tensor.shape[2] > 1:
            tensor = tensor[:, :, :length]
        if tensor.shape[3] > 1:
            tensor = tensor[..., :keys]
        return tensor != 0 if dtype == torch.bool else tensor.to(dtype)


def _check_width(name: str, application: Application, width: int) -> None:
    shape = application.tensors[name].shape
    if width == 0:
        raise InvalidRequest(name, "none, for the layer takes none", f"shape {list(shape)}")
    if shape[-1] != width:
        raise InvalidRequest(f"{name}.shape", f"rows of width {width}, as the layer has it", f"shape {list(shape)}")


def _keys(application: Application) -> int:
    """S of a padded request."""
    return application.length if application.context_length is None else application.context_length


def _longest_keys(request: LayerInput) -> int:
    return max(request.lengths if request.context_lengths is None else request.context_lengths, default=0)


def _reply_bytes(application: Application, layer: Outline, request: LayerInput) -> int:
    rows = application.length * (application.batch if application.batched else 1)
    heads = layer.query_heads
    itemsize = 8 if application.takes_ids else _dtypes.NUMPY[application.tensors["input"].dtype].itemsize
    width = layer.output_width * itemsize
    if application.options.return_lse:
        width += 8 * heads
    if application.options.return_scores is not None:
        keys = _keys(application) if application.batched else _longest_keys(request)
        width += keys * itemsize * (1 if application.options.average_scores else heads)
    return rows * width


def _padded(rows: torch.Tensor, lengths: Sequence[int], length: int, value: float) -> torch.Tensor:
    """[B, length, ...] from rows end to end, with a value in the rows that no sequence has."""
    if all(each == length for each in lengths):
        return rows.reshape(len(lengths), length, *rows.shape[1:])
    padded = rows.new_full((len(lengths), length, *rows.shape[1:]), value)
    start = 0
    for index, each in enumerate(lengths):
        padded[index, :each] = rows[start : start + each]
        start += each
    return padded


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _on_device(request: LayerInput, device: torch.device) -> LayerInput:
    """The request with its tensors on a device."""
    if device.type == "cpu":
        return request
    names = ("input", "context", "mask", "bias", "segments")
    tensors = {name: getattr(request, name) for name in names}
    return replace(
        request, **{name: each.to(device, non_blocking=True) for name, each in tensors.items() if each is not None}
    )
