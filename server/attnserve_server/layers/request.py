"""One application of a loaded layer, from its bytes to its reply.

Inputs are copied out of the received message when it is read, packed, in the layer's dtype: the layer can look at them
(token ids must be in its vocabulary) before the request is admitted, and the message is let go of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from google.protobuf.message import DecodeError

from attnserve import _dtypes, _fields, _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.devices.results import Parts, fetched
from attnserve_server.devices.staging import TORCH
from attnserve_server.errors import Malformed
from attnserve_server.layers.application import Application, application_of
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.outline import Outline
from attnserve_server.layers.reading import read_input
from attnserve_server.layers.registry import Loaded, Registry
from attnserve_server.limits import DEFAULT_LIMITS, RequestLimits
from attnserve_server.reply import ReplyTensor, Timed, payloads_of, tensors_header
from attnserve_server.request import CALL_COST, MAX_KNOWN_HEADER
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
    def kind(self) -> str:
        """A layer is as fast as it is, with one version of its weights or with another."""
        return f"apply {self.loaded.name}"

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.application.priority

    @property
    def cost(self) -> int:
        """What it costs to compute, in FLOPs: those that it asks for, and what its kernel calls cost besides."""
        attentions = max(1, self.loaded.outline.blocks)
        return self.flops * self.loaded.weight + CALL_COST * attentions * len(self.input.lengths)

    @property
    def query_tokens(self) -> int:
        """Rows of input, over all sequences."""
        return sum(self.input.lengths)

    @property
    def scratch_bytes(self) -> int:
        """What its inputs take in the layer's dtype beyond what was received."""
        given = self.input
        tensors = (given.input, given.context, given.mask, given.bias, given.segments)
        return max(0, sum(tensor.nbytes for tensor in tensors if tensor is not None) - self.received_bytes)

    def run_batch(self, device: Device, batch: Sequence[LayerRequest]) -> BatchResult:
        """Computes requests for this layer."""
        costs = [request.cost for request in batch]
        return run_layer(device, batch, lambda inputs: device.share(self.loaded.layer.run, inputs, costs))

    def arranged(self, output: LayerOutput) -> Parts:
        """The elements of the reply, laid out as the input was: output, lse and scores."""
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
                missing = application.keys - per_row.shape[-1]
                per_row = torch.nn.functional.pad(per_row, (0, missing), value=excluded)
                scores = _padded(per_row, lengths, application.length, excluded).movedim(1, -2)
        return rows, lse, scores

    def encode(
        self, result: RequestResult, phases: Phases, batch_size: int, cache_lengths: Sequence[int] = ()
    ) -> tuple[list[_fields.Buffer], int]:
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
            keys = application.keys if application.batched else _longest_keys(self.input)
            rows = (*batch, application.length) if application.options.average_scores else per_head
            tensors.append(("scores", dtype, (*rows, keys)))
        # Apart, because they differ each time: the rest is the same for all replies of these shapes.
        own = pb.ApplyResponse(layer_version=self.loaded.version, cache_lengths=cache_lengths)
        timings = _TIMED.encode(phases, batch_size) + own.SerializeToString()
        payloads = payloads_of(result)
        header = _tensors_header(tuple(tensors), tuple(map(len, payloads)))
        pieces, size = _wire.join(pb.ApplyResponse, header, payloads)
        return [timings, *pieces], len(timings) + size


_TIMED: Final = Timed(pb.ApplyResponse)


@lru_cache(maxsize=1024)
def _tensors_header(tensors: tuple[ReplyTensor, ...], sizes: tuple[int, ...]) -> bytes:
    return tensors_header(pb.ApplyResponse, tensors, sizes)


def read_layer_request(
    registry: Registry, buffer: bytes, at: int = 0, end: int | None = None, limits: RequestLimits = DEFAULT_LIMITS
) -> LayerRequest:
    """The request that a part of a buffer holds, serialised. Raises InvalidRequest, NotFound and AppliesToCaches."""
    if end is None:
        end = len(buffer)
    try:
        header, payloads = _wire.split(pb.ApplyRequest, buffer, at, end)
    except DecodeError as error:
        raise Malformed("", error) from None
    if len(header) > MAX_KNOWN_HEADER:
        limits.check_header(header)
    application = (_known if len(header) <= MAX_KNOWN_HEADER else application_of)(header, limits)
    loaded = registry.get(application.layer)
    return checked(loaded, application, read_input(loaded, application, payloads, limits), end - at)


def checked(loaded: Loaded, application: Application, given: LayerInput, received_bytes: int) -> LayerRequest:
    """The request, if its contents fit the layer. Raises InvalidRequest."""
    loaded.layer.check(given)
    flops = loaded.layer.flops(given.lengths, given.context_lengths, application.options)
    return LayerRequest(
        loaded=loaded,
        application=application,
        input=given,
        flops=flops,
        received_bytes=received_bytes,
        reply_bytes=_reply_bytes(application, loaded.outline, given),
    )


def run_layer(
    device: Device, requests: Sequence[LayerRequest], run: Callable[[Sequence[LayerInput]], Sequence[LayerOutput]]
) -> BatchResult:
    """Brings the inputs of requests to the device, has `run` compute them and fetches what comes out."""
    begin = perf_counter()
    inputs = [_on_device(request.input, device) for request in requests]
    after_staging = perf_counter()
    outputs = run(inputs)
    after_compute = perf_counter()
    return BatchResult(
        results=fetched(device, [request.arranged(output) for request, output in zip(requests, outputs, strict=True)]),
        staging=after_staging - begin,
        compute=after_compute - after_staging,
        fetch=perf_counter() - after_compute,
        kernel_calls=device.take_kernel_calls(),
    )


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
        keys = application.keys if application.batched else _longest_keys(request)
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


def _on_device(request: LayerInput, device: Device) -> LayerInput:
    """The request with its tensors on a device."""
    if device.torch_device.type == "cpu":
        return request
    names = ("input", "context", "mask", "bias", "segments")
    tensors = {name: getattr(request, name) for name in names}
    uploaded: dict[str, Any] = {name: device.upload(each) for name, each in tensors.items() if each is not None}
    return replace(request, **uploaded)
