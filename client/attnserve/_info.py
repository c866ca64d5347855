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
    """The bounds within which a server accepts requests.

    - `max_message_bytes`: the longest message received, in bytes.
    - `max_requests`: the most requests admitted and not yet answered.
    - `max_bytes`: the most bytes of requests and replies admitted and not yet answered. A reply larger than its request
      counts twice.
    - `max_flops`: the most floating-point operations admitted and not yet computed.
    - `max_batch_flops`: the most floating-point operations of one batch; a single request may have more, and then runs
      alone. On CUDA, unless it is configured, batches of a layer's requests have up to 250 times as many.
    - `max_batch_requests`: the most requests in one batch.
    - `max_message_calls`: the most calls, and also the most cancelled ids, in one message of a stream.
    - `max_rank`: the most axes of a tensor.
    - `max_elements`: the most elements of a tensor.
    - `max_sequences`: the most sequences of a request that gives each of them a length, an offset or a cache of its
      own.
    - `max_request_flops`: the most floating-point operations of one request, those of slow kernels counted several
      times.
    - `max_caches`: the most open caches.
    - `max_cache_layers`: the most layers of a cache.
    - `max_layers`: the most loaded layers.
    - `max_caller_streams`: the most streams that one caller may have open.
    - `max_header_bytes`: the most bytes of a request other than the contents of its tensors. This and those below are
      no settings.
    - `max_request_fields`: the most fields of a request, including those of its tensors and the numbers in their
      shapes.
    - `max_call_fields`: the most fields of a call on a stream, not counting those of its request.
    - `max_plain_message_bytes`: the longest message without tensors, such as one with names, in bytes.
    - `max_axis_length`: the longest axis of a tensor.
    """

    max_message_bytes: int
    max_requests: int
    max_bytes: int
    max_flops: int
    max_batch_flops: int
    max_batch_requests: int
    max_message_calls: int
    max_rank: int
    max_elements: int
    max_sequences: int
    max_request_flops: int
    max_caches: int
    max_cache_layers: int
    max_layers: int
    max_caller_streams: int
    max_header_bytes: int
    max_request_fields: int
    max_call_fields: int
    max_plain_message_bytes: int
    max_axis_length: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way in which a server computes attention.

    - `name`: its name, the same as in the server's metrics.
    - `description`: what it is used for.
    """

    name: str
    description: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a server.

    - `name`: its name, such as ``max_requests``; the flag is ``--max-requests``.
    - `value`: its value as one would write it, such as ``256MiB``; None if the server hides it from callers.
    - `source`: where the value came from: ``default``, ``environment``, ``flag`` or ``code``; ``unknown`` if a newer
      server says what this SDK does not know.
    """

    name: str
    value: str | None
    source: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The description of a server.

    - `version`: the version of the server.
    - `address`: where this server itself can be reached, bypassing load balancers; None if it is not configured to say
      so.
    - `device`: the device that computes, such as ``cpu`` or ``cuda:0``.
    - `device_name`: the device's name, as its maker gives it.
    - `torch_version`: the version of torch.
    - `threads`: the threads that compute, on a CPU; None on other devices.
    - `dtypes`: the dtypes that queries may have, such as ``bfloat16``.
    - `limits`: the bounds on requests.
    - `kernels`: the kernels in use, in the order in which they are tried.
    - `features`: the enabled features, such as ``reflection``.
    - `python_version`: the version of Python.
    - `grpc_version`: the version of gRPC.
    - `usable_cpus`: how many processors the server may use.
    - `cache_pool_bytes`: the bytes of the pool of resident caches.
    - `cache_page_bytes`: the bytes of a page of that pool: in each layer of a cache, keys and values of as many whole
      tokens as fit. None if the server does not say it.
    - `settings`: every setting, in the order of the documentation.
    """

    version: str
    address: str | None
    device: str
    device_name: str
    torch_version: str
    threads: int | None
    dtypes: tuple[str, ...]
    limits: Limits
    kernels: tuple[Kernel, ...]
    features: tuple[str, ...]
    python_version: str
    grpc_version: str
    usable_cpus: int
    cache_pool_bytes: int
    cache_page_bytes: int | None
    settings: tuple[Setting, ...]


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
        cache_page_bytes=info.cache_page_bytes or None,
        settings=tuple(
            Setting(setting.name, None if setting.hidden else setting.value, _SOURCES.get(setting.source, "unknown"))
            for setting in info.settings
        ),
    )


SERVER_INFO: Final = Rpc(SERVICE + "ServerInfo", pb.ServerInfoRequest(), pb.ServerInfoResponse, _read, anyhow=True)
"""Asks a server for its description."""
