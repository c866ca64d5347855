"""Opens the engine of a server, according to its configuration: its admission, its queue, and the gauges of both.

In: a configuration and a device. Out: an `Engine`, which lets nothing in yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnserve_server.observability import scraped
from attnserve_server.observability.metrics import Metrics
from attnserve_server.scheduling.admission import Admission
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry
from attnserve_server.settings.config import Config

if TYPE_CHECKING:
    from attnserve_server.devices import Device
    from attnserve_server.observability.tracing import Tracing

BATCH_FLOPS: Final = 4 * 10**9
"""What one batch may cost if nothing is configured: some 10 ms of a CPU, and more than a GPU needs to be busy."""
CUDA_LAYER_DISCOUNT: Final = 250
"""How many operations of a layer count as one towards `BATCH_FLOPS`, on a GPU. A batch reads the layer's weights once
for all its requests, and that takes as long as some hundred operations with each weight. So the steps of many callers
in a large decoder run together.
"""
CUDA_BATCH_BYTES: Final = 16 << 20
"""The most bytes that the requests of one batch bring, on a GPU. If there are more, it is better to copy the rest while
a first part is computed.
"""


def batch_flops(config: Config) -> int:
    """The most floating-point operations of a batch, as configured or by default."""
    return config.max_batch_flops or min(BATCH_FLOPS, config.max_flops)


def open_engine(config: Config, device: Device, metrics: Metrics, tracing: Tracing | None) -> Engine:
    """The engine of a configuration, on the running event loop."""
    admission = Admission(
        max_requests=config.max_requests,
        max_bytes=config.max_bytes,
        max_flops=config.max_flops,
        max_reply_bytes=config.max_message_bytes,
        max_queue_time=config.max_queue_time,
    )
    on_gpu = not device.threads
    queue: BatchQueue[Entry] = BatchQueue(
        batch_flops(config),
        config.max_batch_requests,
        config.priority_aging,
        admission.pace,
        CUDA_BATCH_BYTES if on_gpu else None,
        CUDA_LAYER_DISCOUNT if on_gpu and not config.max_batch_flops else 1,
    )
    engine = Engine(device, queue, admission, metrics, config.max_wait, tracing)
    load = scraped.load(
        queue_requests=lambda: queue.requests + engine.waiting_for_turns,
        queue_bytes=lambda: queue.bytes + engine.bytes_waiting_for_turns,
        in_flight_requests=lambda: admission.requests,
        in_flight_bytes=lambda: admission.bytes,
        in_flight_flops=lambda: admission.flops,
        in_flight_seconds=lambda: admission.seconds,
        limits={
            "requests": lambda: config.max_requests,
            "bytes": lambda: config.max_bytes,
            "flops": lambda: config.max_flops,
            "seconds": lambda: admission.longest_seconds,
        },
    )
    metrics.watch(*load)
    metrics.watch_callers(admission.bytes_of_callers)
    worker = engine.worker
    metrics.watch(scraped.Device(lambda: worker.busy_seconds, lambda: worker.batch_seconds, device.memory))
    return engine
