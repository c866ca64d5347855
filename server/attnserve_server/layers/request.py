"""One application of a loaded layer, from its bytes to its reply.

Where the native kernel computes the whole request in one call, inputs stay where they were received. All others are
copied from the message when it is read, packed, in the layer's dtype: so the layer can check them (token ids must be in
its vocabulary) before the request is admitted, and the message can be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from attnserve import _fields, _wire
from attnserve._wire import Payloads
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.devices.results import ReplyTensors, fetched
from attnserve_server.devices.staging import TORCH
from attnserve_server.kernels import excluded_score, widened
from attnserve_server.layers.application import Application, application_of
from attnserve_server.layers.checks import check_contents
from attnserve_server.layers.direct import Received, apply
from attnserve_server.layers.extent import LayerExtent
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.reading import read_input
from attnserve_server.layers.registry import Loaded, Registry
from attnserve_server.layers.rows import padding_of
from attnserve_server.layers.specification import Dtype
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.reply import ReplyTensor, Timed, payloads_of, tensors_header
from attnserve_server.requests.request import MAX_KNOWN_HEADER
from attnserve_server.requests.work import BatchResult, Phases, RequestResult, Work

if TYPE_CHECKING:
    from attnserve_server.devices import Device

WIRE = {dtype: value for value, dtype in TORCH.items() if dtype != torch.uint8}
"""The wire dtype of each floating torch dtype."""

_known = lru_cache(maxsize=4096)(application_of)


@dataclass(slots=True)
class LayerRequest(Work):
    """An application that has been checked against its layer; it keeps the layer alive.

    It has either `received`, or `input` if it is computed on tensors.
    """

    reply_field: ClassVar[int] = pb.AttendStreamReply.APPLY_FIELD_NUMBER

    loaded: Loaded
    application: Application
    extent: LayerExtent
    received_bytes: int
    received: Received | None
    input: LayerInput | None

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.loaded.name

    @property
    def group(self) -> Hashable:
        """Requests for one version of one layer share batches if they are computed in the same way."""
        return self.loaded if self.received is None else self.received.plan.group

    @property
    def kind(self) -> str:
        """The layer's name, whatever the version, since that does not change its speed; and whether it runs at once."""
        return f"apply {self.loaded.name}{'' if self.received is None else ', at once'}"

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.application.priority

    @property
    def scratch_bytes(self) -> int:
        """The bytes that its inputs take in the layer's dtype beyond those received."""
        given = self.input
        if given is None:
            return 0
        tensors = (given.input, given.context, given.mask, given.bias, given.segments)
        return max(0, sum(tensor.nbytes for tensor in tensors if tensor is not None) - self.received_bytes)

    def run_batch(self, device: Device, batch: Sequence[LayerRequest]) -> BatchResult:
        """Computes requests for this layer."""
        if self.received is not None:
            return _apply(device, batch)
        costs = [request.extent.cost for request in batch]
        return run_layer(device, batch, lambda inputs: device.share(self.loaded.layer.run, inputs, costs))

    def on_tensors(self) -> LayerRequest:
        """The same request, to be computed on tensors."""
        assert self.received is not None
        specification, payloads = self.loaded.specification, self.received.payloads
        return replace(self, received=None, input=read_input(specification, self.application, self.extent, payloads))

    def arranged(self, output: LayerOutput) -> ReplyTensors:
        """The elements of the reply, laid out as the input was: output, lse and scores."""
        application, lengths = self.application, self.extent.lengths
        dtype = output.output.dtype if application.takes_ids else TORCH[application.tensors["input"].dtype]
        rows, lse, scores = output.output.to(dtype), output.lse, output.scores
        if scores is not None:
            scores = scores.to(dtype)
        if application.batched:
            rows = _padded(rows, lengths, application.length, 0.0)
            if lse is not None:
                lse = _padded(lse.mT, lengths, application.length, -torch.inf).mT
            if scores is not None:
                stage = application.options.return_scores
                per_row = widened(scores.movedim(-2, 0), application.keys, stage)  # [total, (Hq,) S]
                scores = _padded(per_row, lengths, application.length, excluded_score(stage)).movedim(1, -2)
        return rows, lse, scores

    def encode(
        self, result: RequestResult, phases: Phases, batch_size: int, cache_lengths: Sequence[int] = ()
    ) -> tuple[list[_fields.Buffer], int]:
        """The pieces of the encoded ApplyResponse, and their total length."""
        loaded, payloads = self.loaded, payloads_of(result)
        header = _tensors_header(
            self.application,
            loaded.version,
            loaded.specification.dtype,
            loaded.outline.output_width,
            loaded.outline.num_query_heads,
            self.extent.longest_keys,
            tuple(map(len, payloads)),
        )
        timings = _TIMED.encode(phases, batch_size)
        if cache_lengths:
            timings += pb.ApplyResponse(cache_lengths=cache_lengths).SerializeToString()
        pieces, size = _wire.join(pb.ApplyResponse, header, payloads)
        return [timings, *pieces], len(timings) + size


_TIMED: Final = Timed(pb.ApplyResponse)


@lru_cache(maxsize=1024)
def _tensors_header(
    application: Application,
    version: int,
    layer_dtype: Dtype,
    width: int,
    heads: int,
    longest_keys: int,
    sizes: tuple[int, ...],
) -> bytes:
    """What replies to an application have in common: the layer's version, and the tensors without their contents."""
    options, dtype = application.options, application.tensors["input"].dtype
    if application.takes_ids:
        dtype = WIRE[getattr(torch, layer_dtype)]
    batch = [application.batch] if application.batched else []
    per_head = (*batch, heads, application.length)
    tensors: list[ReplyTensor] = [("output", dtype, (*batch, application.length, width))]
    if options.return_lse:
        double = layer_dtype == "float64"
        tensors.append(("lse", tensor_pb2.DATA_TYPE_FLOAT64 if double else tensor_pb2.DATA_TYPE_FLOAT32, per_head))
    if options.return_scores is not None:
        rows = (*batch, application.length) if options.average_scores else per_head
        tensors.append(("scores", dtype, (*rows, longest_keys)))
    own = pb.ApplyResponse(layer_version=version).SerializeToString()
    return own + tensors_header(pb.ApplyResponse, tensors, sizes)


def layer_request_of(
    registry: Registry,
    header: bytes,
    payloads: Payloads,
    size: int,
    limits: RequestLimits,
    caches: int = 0,
    check: Callable[[Loaded], object] | None = None,
) -> LayerRequest:
    """The request that a header states, apart from its references to this many caches. `size` is what was received, in
    bytes; `check` raises InvalidRequest for layers that cannot take it. Raises InvalidRequest and NotFound.
    """
    remember = len(header) <= MAX_KNOWN_HEADER
    application = (_known if remember else application_of)(header, caches, limits)
    loaded = registry.get(application.layer)
    if check is not None:
        check(loaded)
    extent = loaded.extents.of(application, payloads, limits, remember=remember)
    if extent.plan is not None:
        received = Received(extent.plan, payloads, extent.flops)
        return LayerRequest(loaded, application, extent, size, received, None)
    given = read_input(loaded.specification, application, extent, payloads)
    check_contents(loaded.specification.architecture, given)
    return LayerRequest(loaded, application, extent, size, None, given)


def _apply(device: Device, batch: Sequence[LayerRequest]) -> BatchResult:
    """Computes requests where they were received. Those with NaN or infinities must run again, on tensors."""
    begin = perf_counter()
    results, broken = apply(device, [request.received for request in batch if request.received is not None])
    again = {place: batch[place].on_tensors() for place in broken}
    calls = device.take_kernel_calls()
    return BatchResult(results, 0.0, perf_counter() - begin, 0.0, kernel_calls=calls, again=again)


def run_layer(
    device: Device, requests: Sequence[LayerRequest], run: Callable[[Sequence[LayerInput]], Sequence[LayerOutput]]
) -> BatchResult:
    """Brings the inputs of requests to the device, computes them with `run` and fetches the results."""
    begin = perf_counter()
    inputs = [_on_device(request.input, device) for request in requests if request.input is not None]
    after_staging = perf_counter()
    outputs = run(inputs)
    after_compute = perf_counter()
    return BatchResult(
        results=fetched(device, [request.arranged(output) for request, output in zip(requests, outputs, strict=True)]),
        staging=after_staging - begin,
        compute=after_compute - after_staging,
        fetch=perf_counter() - after_compute,
        padding=padding_of(outputs),
        kernel_calls=device.take_kernel_calls(),
    )


def _padded(rows: torch.Tensor, lengths: Sequence[int], length: int, value: float) -> torch.Tensor:
    """[B, length, ...] from rows end to end, padded with a value."""
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
