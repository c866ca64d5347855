"""Registries of layers, and requests to layers, read as the server reads them, from their bytes."""

from __future__ import annotations

from pathlib import Path

from limits import LIMITS

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.caches.references import read_header
from attnserve_server.devices import Device
from attnserve_server.layers.registry import Registry
from attnserve_server.layers.request import LayerRequest, layer_request_of
from attnserve_server.requests.limits import RequestLimits


def registry_of(device: Device, directory: Path, max_layers: int = 100) -> Registry:
    """A registry without layers, which tells nobody of changes."""
    return Registry(device, directory, lambda sizes: None, max_layers)


def read_layer_request(
    registry: Registry, buffer: bytes, at: int = 0, end: int | None = None, limits: RequestLimits = LIMITS
) -> LayerRequest:
    """The serialised request, without caches, in part of a buffer. Raises InvalidRequest and NotFound."""
    end = len(buffer) if end is None else end
    references, header, payloads = read_header(pb.ApplyRequest, buffer, at, end, limits)
    assert not references
    return layer_request_of(registry, header, payloads, end - at, limits)
