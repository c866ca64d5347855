"""The description of a server: `ServerInfoResponse` as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from attnserve import _dtypes
from attnserve._rpc import Rpc
from attnserve._settings.config import SERVICE
from attnserve.v1 import attention_pb2 as pb


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds within which a server accepts requests."""

    max_message_bytes: int
    """The longest message received, in bytes."""
    max_requests: int
    """The most requests admitted and not yet answered."""
    max_bytes: int
    """The most bytes of requests and replies admitted and not yet answered."""
    max_flops: int
    """The most floating-point operations admitted and not yet computed."""
    max_batch_flops: int
    """The most floating-point operations of one batch; a single request may have more, and then runs alone. On CUDA,
    unless it is configured, batches of a layer's requests have up to 250 times as many.
    """
    max_batch_requests: int
    """The most requests in one batch."""
    max_message_calls: int
    """The most calls, and also the most cancelled ids, in one message of a stream."""
    max_rank: int
    """The most axes of a tensor."""
    max_elements: int
    """The most elements of a tensor."""
    max_sequences: int
    """The most sequences of a request that gives each of them a length, an offset or a cache of its own."""
    max_request_flops: int
    """The most floating-point operations of one request, those of slow kernels counted several times."""
    max_caches: int
    """The most open caches."""
    max_cache_layers: int
    """The most layers of a cache."""
    max_layers: int
    """The most loaded layers."""
    max_caller_streams: int
    """The most streams that one caller may have open."""
    max_header_bytes: int
    """The most bytes of a request other than the contents of its tensors. This and those below are no settings."""
    max_request_fields: int
    """The most fields of a request, including those of its tensors and the numbers in their shapes."""
    max_call_fields: int
    """The most fields of a call on a stream, not counting those of its request."""
    max_plain_message_bytes: int
    """The longest message without tensors, such as one with names, in bytes."""
    max_axis_length: int
    """The longest axis of a tensor."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way in which a server computes attention."""

    name: str
    """Its name, the same as in the server's metrics."""
    description: str
    """What it is used for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a server."""

    name: str
    """Its name, such as ``max_requests``; the flag is ``--max-requests``."""
    value: str | None
    """Its value as one would write it, such as ``256MiB``; None if the server hides it from callers."""
    source: str
    """Where the value came from: ``default``, ``environment``, ``flag`` or ``code``."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The description of a server."""

    version: str
    """The version of the server."""
    address: str | None
    """Where this server itself can be reached, bypassing load balancers; None if it is not configured to say so."""
    device: str
    """The device that computes, such as ``cpu`` or ``cuda:0``."""
    device_name: str
    """The device's name, as its maker gives it."""
    torch_version: str
    """The version of torch."""
    threads: int | None
    """The threads that compute, on a CPU; None on other devices."""
    dtypes: tuple[str, ...]
    """The dtypes that queries may have, such as ``bfloat16``."""
    limits: Limits
    """The bounds on requests."""
    kernels: tuple[Kernel, ...]
    """The kernels in use, in the order in which they are tried."""
    features: tuple[str, ...]
    """The enabled features, such as ``reflection``."""
    python_version: str
    """The version of Python."""
    grpc_version: str
    """The version of gRPC."""
    usable_cpus: int
    """How many processors the server may use."""
    cache_pool_bytes: int
    """The bytes of the pool of resident caches."""
    settings: tuple[Setting, ...]
    """Every setting, in the order of the documentation."""


_SOURCES: Final = {
    pb.SETTING_SOURCE_DEFAULT: "default",
    pb.SETTING_SOURCE_ENVIRONMENT: "environment",
    pb.SETTING_SOURCE_FLAG: "flag",
    pb.SETTING_SOURCE_CODE: "code",
}


def _read(info: pb.ServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=info.version,
        address=info.address or None,
        device=info.device,
        device_name=info.device_name,
        torch_version=info.torch_version,
        threads=info.threads or None,
        dtypes=tuple(_dtypes.name(dtype) for dtype in info.dtypes),
        limits=Limits(**{limit.name: getattr(info.limits, limit.name) for limit in fields(Limits)}),
        kernels=tuple(Kernel(kernel.name, kernel.description) for kernel in info.kernels),
        features=tuple(info.features),
        python_version=info.python_version,
        grpc_version=info.grpc_version,
        usable_cpus=info.usable_cpus,
        cache_pool_bytes=info.cache_pool_bytes,
        settings=tuple(
            Setting(setting.name, None if setting.hidden else setting.value, _SOURCES.get(setting.source, "unknown"))
            for setting in info.settings
        ),
    )


SERVER_INFO: Final = Rpc(SERVICE + "ServerInfo", pb.ServerInfoRequest(), pb.ServerInfoResponse, _read, anyhow=True)
"""Asks a server for its description."""
