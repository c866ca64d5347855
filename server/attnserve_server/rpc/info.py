"""What a server tells about itself: versions, device, kernels, limits, and every setting with its source."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Final

import grpc
import torch

from attnserve._wire import MOST_FIELDS
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server import __version__
from attnserve_server.caches.store import CacheStore
from attnserve_server.devices import Device
from attnserve_server.host.cpus import usable_cpus
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.tensors import MAX_LENGTH
from attnserve_server.rpc.calls import MAX_CALL_FIELDS
from attnserve_server.rpc.rpcs import MAX_PLAIN_BYTES
from attnserve_server.scheduling.opening import batch_flops
from attnserve_server.settings.config import Config, Source

_SOURCES: Final[Mapping[Source, pb.SettingSource]] = {
    "default": pb.SETTING_SOURCE_DEFAULT,
    "environment": pb.SETTING_SOURCE_ENVIRONMENT,
    "flag": pb.SETTING_SOURCE_FLAG,
    "code": pb.SETTING_SOURCE_CODE,
}

_DTYPES: Final = (
    tensor_pb2.DATA_TYPE_FLOAT32,
    tensor_pb2.DATA_TYPE_FLOAT16,
    tensor_pb2.DATA_TYPE_BFLOAT16,
    tensor_pb2.DATA_TYPE_FLOAT64,
)


def server_info(config: Config, device: Device, limits: RequestLimits, caches: CacheStore) -> pb.ServerInfoResponse:
    """The reply to the RPC `ServerInfo`. The last two have what is in force where the configuration leaves it open."""
    return pb.ServerInfoResponse(
        version=__version__,
        device=device.name,
        device_name=device.description,
        torch_version=torch.__version__,
        threads=device.threads,
        dtypes=_DTYPES,
        limits=pb.Limits(
            max_message_bytes=config.max_message_bytes,
            max_requests=config.max_requests,
            max_bytes=config.max_bytes,
            max_flops=config.max_flops,
            max_batch_flops=batch_flops(config),
            max_batch_requests=config.max_batch_requests,
            max_message_calls=config.max_message_calls,
            max_rank=limits.max_rank,
            max_elements=limits.max_elements,
            max_sequences=limits.max_sequences,
            max_request_flops=limits.max_request_flops,
            max_caches=config.max_caches,
            max_cache_layers=config.max_cache_layers,
            max_layers=config.max_layers,
            max_caller_streams=config.max_caller_streams,
            max_header_bytes=limits.max_header_bytes,
            max_request_fields=MOST_FIELDS,
            max_call_fields=MAX_CALL_FIELDS,
            max_plain_message_bytes=MAX_PLAIN_BYTES,
            max_axis_length=MAX_LENGTH,
        ),
        kernels=[pb.Kernel(name=name, description=description) for name, description in device.kernels()],
        features=["reflection"] if config.reflection else [],
        settings=[
            pb.Setting(name=name, value=value, source=_SOURCES[source], hidden=value is None)
            for name, value, source in config.effective()
        ],
        python_version=platform.python_version(),
        grpc_version=grpc.__version__,
        usable_cpus=usable_cpus(),
        address=config.advertise_address,
        cache_pool_bytes=caches.pool_bytes,
        cache_page_bytes=caches.page_bytes,
    )
