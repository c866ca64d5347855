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
    """The floating-point operations that one batch may have; one request may have more, and then runs alone."""
    max_batch_requests: int
    """The most requests in one batch."""
    max_message_calls: int
    """The most calls, and the most cancelled ones, in one message of a stream."""
    max_rank: int
    """The most axes of a tensor. 0, here and below: a server of a version that does not say."""
    max_elements: int
    """The most elements of a tensor."""
    max_sequences: int
    """The most sequences of a request in which each has a length, an offset or a cache of its own."""
    max_request_flops: int
    """The most floating-point operations of one request, those of slow kernels counted several times."""
    max_caches: int
    """The most caches open."""
    max_cache_layers: int
    """The most layers of a cache."""
    max_layers: int
    """The most layers loaded."""
    max_caller_streams: int
    """The most streams that one caller may have open."""
    max_header_bytes: int
    """What a request may have beside the contents of its tensors, in bytes. No setting, as those below."""
    max_request_fields: int
    """The most fields of a request, those of its tensors and the numbers of their shapes included."""
    max_call_fields: int
    """The most fields of a call on a stream, those of its request apart."""
    max_plain_message_bytes: int
    """The longest message without tensors, such as one of names, in bytes."""
    max_axis_length: int
    """The longest axis of a tensor."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way in which a server computes attention."""

    name: str
    """Its name, as in the server's metrics."""
    description: str
    """What it is used for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a server."""

    name: str
    """Its name, such as ``max_requests``; the flag is ``--max-requests``."""
    value: str | None
    """Its value as it would be written, such as ``256MiB``; None where the server does not tell callers."""
    source: str
    """Where the value came from: ``default``, ``environment``, ``flag`` or ``code``."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is."""

    version: str
    """The version of the server."""
    device: str
    """The device that computes, such as ``cpu`` or ``cuda:0``."""
    device_name: str
    """What the device is, in its maker's words."""
    torch_version: str
    """The version of torch."""
    threads: int
    """The threads that compute, on a CPU; 0 on other devices."""
    dtypes: tuple[str, ...]
    """The dtypes that queries may have, such as ``bfloat16``."""
    limits: Limits
    """The bounds on requests."""
    kernels: tuple[Kernel, ...]
    """The kernels in use, in the order in which they are tried."""
    features: tuple[str, ...]
    """What is enabled, such as ``reflection``."""
    python_version: str
    """The version of Python."""
    grpc_version: str
    """The version of gRPC."""
    usable_cpus: int
    """How many processors the server may use."""
    cache_pool_bytes: int
    """The bytes of the pool of resident caches."""
    settings: tuple[Setting, ...]
    """Every setting, in the order of the documentation; none of a server that is older than they are."""


_SOURCES: Final = {
    pb.SETTING_SOURCE_DEFAULT: "default",
    pb.SETTING_SOURCE_ENVIRONMENT: "environment",
    pb.SETTING_SOURCE_FLAG: "flag",
    pb.SETTING_SOURCE_CODE: "code",
}


def _read(info: pb.ServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=info.version,
        device=info.device,
        device_name=info.device_name,
        torch_version=info.torch_version,
        threads=info.threads,
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


SERVER_INFO: Final = Rpc(SERVICE + "ServerInfo", pb.ServerInfoRequest(), pb.ServerInfoResponse, _read)
"""Asks a server for its description."""
