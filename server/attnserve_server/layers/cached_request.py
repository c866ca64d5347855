"""A decoder applied to sequences that continue resident caches: an `ApplyRequest` with references, from its bytes to
its reply.

Each block of the decoder keeps its keys and values in one layer of a cache. A request appends its inputs to all layers
of all its caches, or to none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

import torch

from attnserve import _fields
from attnserve._wire import Payloads
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.layer import Placement
from attnserve_server.caches.references import Reference, read_header
from attnserve_server.caches.work import CacheHost, CacheWork, Use, check_distinct
from attnserve_server.errors import FailedPrecondition, InvalidRequest
from attnserve_server.kernels import part_of
from attnserve_server.layers.cost import resident_cost
from attnserve_server.layers.reading import read_mask
from attnserve_server.layers.registry import Loaded, Registry
from attnserve_server.layers.request import LayerRequest, layer_request_of, run_layer
from attnserve_server.layers.resident import Resident, Residents
from attnserve_server.layers.specification import Transformer
from attnserve_server.layers.transformer import TransformerLayer
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.tensors import check_masks
from attnserve_server.requests.work import BatchResult, Extent, Phases, RequestResult, Work

if TYPE_CHECKING:
    from attnserve_server.devices import Device

NOTHING = Placement([], [])


@dataclass(slots=True, eq=False)
class CachedLayerRequest(CacheWork):
    """An application of a decoder to sequences, where sequence b continues cache b.

    `uses` has those of all layers of the first cache, then of all layers of the next. `mask` covers all tokens that the
    longest cache has after the appends.
    """

    reply_field: ClassVar[int] = pb.AttendStreamReply.APPLY_FIELD_NUMBER

    applied: LayerRequest
    decoder: TransformerLayer
    mask: torch.Tensor | None
    limits: RequestLimits
    extent: Extent = field(init=False)
    """The extent of `applied` and, in addition, of attention to the tokens that the caches hold before it."""

    @property
    def appended_field(self) -> str:
        """The input: keys and values are made of it."""
        return "input"

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.applied.layer

    @property
    def group(self) -> Hashable:
        """Requests with caches for one version of one layer share batches."""
        return CachedLayerRequest, self.applied.group

    @property
    def kind(self) -> str:
        """A layer with caches is of another kind than one without."""
        return f"{self.applied.kind}, with caches"

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.applied.priority

    @property
    def scratch_bytes(self) -> int:
        """The bytes that its inputs take in the layer's dtype beyond those received."""
        return self.applied.scratch_bytes

    def count(self, lengths: list[int]) -> None:
        """Counts its cost, when its turn comes. Raises InvalidRequest if that is more than a request may cost."""
        self.count_over(self._before[:: self._layers])

    def count_over(self, resident: Sequence[int]) -> None:
        """Counts its cost over caches that hold this many tokens before it. Raises InvalidRequest."""
        extent, hides = self.applied.extent, self.mask is not None
        cost = resident_cost(self.decoder.architecture, extent.lengths, resident, hides=hides)
        self.limits.check_flops(extent.weighed + cost.weighed)
        flops, weighed = extent.flops + cost.flops, extent.cost + cost.weighed
        self.extent = Extent(flops, weighed, extent.query_tokens, extent.reply_bytes)

    def fit(self, longest: int) -> None:
        """Sets where the inputs begin. Raises FailedPrecondition if a cache has layers of different lengths, and
        InvalidRequest if the positions of inputs or the mask do not fit the caches.
        """
        given, last = self.applied.input, self.decoder.end_of_positions
        assert given is not None
        for use in self.uses:
            if use.layer == 0 and len(set(lengths := use.cache.lengths)) > 1:
                found = f"{min(lengths)} to {max(lengths)} tokens in its layers"
                message = f"{self.spoken_of(use.cache)} has {found}; a decoder needs equally many"
                raise FailedPrecondition(message, "UNEQUAL_LENGTHS", name=use.cache.name)
        offsets = [use.cache.length(0) for use in self.uses if use.layer == 0]
        for length, offset in zip(given.lengths, offsets, strict=True):
            if length and last is not None and offset + length > last:
                raise InvalidRequest("input", f"positions from 0 to {last - 1}", f"{offset} to {offset + length - 1}")
        if self.mask is not None:
            application, heads = self.applied.application, self.applied.loaded.outline.num_query_heads
            rows = application.length if application.batched else max(given.lengths, default=0)
            target = (application.batch, heads, rows, longest)
            check_masks(application.tensors, target, application.mask_axes)
        self.applied.input = replace(given, offsets=offsets)

    def run_batch(self, device: Device, batch: Sequence[CachedLayerRequest]) -> BatchResult:
        """Computes requests for this layer."""
        residents = Residents(self.host.pages, [request.residents(device) for request in batch])
        run = partial(self.decoder.run, residents=residents)
        return run_layer(device, [request.applied for request in batch], run)

    def residents(self, device: Device) -> list[Resident]:
        """The caches, after the appends."""
        placements = iter(self.placements)
        placed = [next(placements) if use.tokens else NOTHING for use in self.uses]
        mask = None if self.mask is None else device.upload(self.mask)
        layers, residents = self._layers, []
        for n, (length, first) in enumerate(
            zip(self.applied.extent.lengths, range(0, len(self.uses), layers), strict=True)
        ):
            cache = self.uses[first].cache
            residents.append(
                Resident(
                    shape=cache.shape,
                    length=self.lengths[first],
                    tables=[cache.table(layer) for layer in range(layers)],
                    placements=placed[first : first + layers],
                    mask=None if mask is None else _of_sequence(mask, n, length, self.lengths[first]),
                )
            )
        return residents

    def encode(self, result: RequestResult, phases: Phases, batch_size: int) -> tuple[list[_fields.Buffer], int]:
        """The pieces of the encoded ApplyResponse, and their total length."""
        return self.applied.encode(result, phases, batch_size, self.lengths[:: self._layers])

    @property
    def _layers(self) -> int:
        """How many layers each cache has."""
        return self.uses[0].cache.shape.layers


def read_apply(
    host: CacheHost,
    registry: Registry,
    caller: Caller,
    buffer: bytes,
    at: int,
    end: int,
    limits: RequestLimits,
) -> Work:
    """The application that a caller asks for in part of a buffer, with caches or without. Raises RequestError."""
    references, header, payloads = read_header(pb.ApplyRequest, buffer, at, end, limits)
    if not references:
        return layer_request_of(registry, header, payloads, end - at, limits)
    applied = layer_request_of(registry, header, payloads, end - at, limits, len(references), _decoder)
    return _read(host, caller.name, references, applied, payloads, limits)


def _read(
    host: CacheHost,
    owner: str | None,
    references: Sequence[Reference],
    applied: LayerRequest,
    payloads: Payloads,
    limits: RequestLimits,
) -> CachedLayerRequest:
    decoder, architecture = _decoder(applied.loaded)
    now = monotonic()
    caches = [host.store.get(reference.name, now, owner) for reference in references]
    for index, (reference, cache) in enumerate(zip(references, caches, strict=True)):
        if reference.layer:
            raise InvalidRequest(f"caches[{index}].layer", "0, for each block has a layer of its own", reference.layer)
        _check_shape(index, cache, architecture)
    application, extent = applied.application, applied.extent
    uses = [
        Use(
            cache,
            layer,
            length,
            None if layer else reference.expected_length,
            reference.append_id,
        )
        for cache, reference, length in zip(caches, references, extent.lengths, strict=True)
        for layer in range(architecture.blocks)
    ]
    check_distinct(uses[:: architecture.blocks])
    request = CachedLayerRequest(
        host=host,
        uses=tuple(uses),
        received_bytes=applied.received_bytes,
        applied=applied,
        decoder=decoder,
        mask=read_mask(application, payloads),
        limits=limits,
    )
    request.count_over([use.coming_length() for use in uses[:: architecture.blocks]])
    return request


def _decoder(loaded: Loaded) -> tuple[TransformerLayer, Transformer]:
    """The layer and its architecture, if it can keep its keys and values in caches."""
    layer, architecture = loaded.layer, loaded.specification.architecture
    if not isinstance(layer, TransformerLayer) or not isinstance(architecture, Transformer):
        raise InvalidRequest("caches", f"none, for {loaded.name!r} is no transformer", "some")
    if not architecture.block.self_attention.causal:
        raise InvalidRequest("caches", f"none, for {loaded.name!r} has no causal self-attention", "some")
    return layer, architecture


def _check_shape(index: int, cache: Cache, architecture: Transformer) -> None:
    """Raises InvalidRequest if a cache does not have the heads, widths and layers that the decoder needs."""
    shape, attention = cache.shape, architecture.block.self_attention
    for name, wanted, found in (
        ("layers", architecture.blocks, shape.layers),
        ("num_kv_heads", attention.kv_heads, shape.num_kv_heads),
        ("head_dim", attention.head_dim, shape.head_dim),
        ("value_dim", attention.value_dim, shape.value_dim),
    ):
        if found != wanted:
            raise InvalidRequest(f"caches[{index}].name", f"a cache with {name} {wanted}, as the layer has it", found)


def _of_sequence(mask: torch.Tensor, n: int, length: int, keys: int) -> torch.Tensor:
    """The part of a mask for the n-th sequence, which has `length` inputs and `keys` keys."""
    return part_of(part_of(part_of(mask, 0, n, n + 1), 2, 0, length), 3, 0, keys)
