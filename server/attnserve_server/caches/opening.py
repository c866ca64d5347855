"""Opens the caches of a server, according to its configuration and its memory.

In: a configuration and a device. Out: the `CacheHost`, with its pool's memory allocated, or an error that says why not;
and a warning if what is left is less than requests may take.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.store import CacheStore
from attnserve_server.caches.work import CacheHost
from attnserve_server.devices import Device
from attnserve_server.devices.failures import is_out_of_memory
from attnserve_server.host import control_groups
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.host.memory import resident_bytes
from attnserve_server.settings import units
from attnserve_server.settings.config import LEAST_PAGE_BYTES, Config
from attnserve_server.start_errors import ConfigError, StartError

logger = logging.getLogger(__name__)

DEFAULT_CACHE_BYTES: Final = 512 << 20
"""The pool on a CPU, unless a quarter of the memory is less."""
DEFAULT_PAGE_BYTES: Final = 512 << 10
"""The pages on a CPU, unless the pool is less."""
DEFAULT_CUDA_PAGE_BYTES: Final = 2 << 20
"""The same on CUDA: on an H100, reading 16,384 tokens of 4 KiB takes three quarters as long as in pages of 512 KiB."""


def open_caches(config: Config, device: Device) -> CacheHost:
    """The caches of a configuration. Raises StartError if there is no memory for them, and ConfigError if the default
    is less than a page.
    """
    memory = _memory(device)
    pool_bytes = config.cache_bytes or _default_bytes(device, memory)
    page_bytes = config.cache_page_bytes or _default_page_bytes(device, pool_bytes)
    size = units.format_size(pool_bytes)
    if pool_bytes < LEAST_PAGE_BYTES:
        raise StartError(f"cache_bytes: there is no memory for a page of caches on {device.name}")
    if pool_bytes < page_bytes:
        expected = f"at most cache_bytes, by default {size} here"
        raise ConfigError("cache_page_bytes", expected, config.show("cache_page_bytes"))
    # Memory that is not there may be granted all the same, and the process be killed when it writes to it.
    if memory is not None:
        left = max(0, memory - resident_bytes())
        if pool_bytes > left:
            raise StartError(f"cache_bytes: {size} of memory is not available: there is {_in_mib(left)}")
        if config.max_bytes > left - pool_bytes:
            logger.warning(
                "max_bytes: requests may take %s, but beside caches of %s there is %s: the system may end the process",
                units.format_size(config.max_bytes),
                size,
                _in_mib(left - pool_bytes),
            )
    try:
        return CacheHost(
            CacheStore(pool_bytes, page_bytes, config.max_caches, config.max_cache_layers),
            PagePool.of(device, pool_bytes, page_bytes),
            config.advertise_address,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise StartError(f"cache_bytes: {size} of memory is not available on {device.name}") from None


def _in_mib(size: int) -> str:
    return units.format_size(size >> 20 << 20)


def _memory(device: Device) -> int | None:
    """The memory for a pool and everything else: the machine's, or what control groups grant of it; None where the
    device has memory of its own.
    """
    if device.torch_device.type != "cpu":
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = control_groups.memory_limit()
    return physical if limit is None else min(physical, limit)


def _default_page_bytes(device: Device, pool_bytes: int) -> int:
    most = DEFAULT_PAGE_BYTES if device.torch_device.type == "cpu" else DEFAULT_CUDA_PAGE_BYTES
    return min(most, pool_bytes // CACHE_LINE * CACHE_LINE)


def _default_bytes(device: Device, memory: int | None) -> int:
    if memory is None:
        return device.memory()["free"] // 2
    return min(DEFAULT_CACHE_BYTES, memory // 4, max(0, memory - resident_bytes()) // 2)
