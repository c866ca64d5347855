"""What a server tells of itself, its layers and caches, as text for a terminal.

In: descriptions. Out: lines, with aligned columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attnserve._commands.table import table
from attnserve._info import ServerInfo, Setting
from attnserve._layers import Layer
from attnserve._requests.cache_requests import CacheInfo, CachePool


def info_text(info: ServerInfo) -> str:
    """The information, one item per line."""
    pages = "" if info.cache_page_bytes is None else f", in pages of {info.cache_page_bytes:,}"
    rows = [
        ("version", info.version),
        *(() if info.address is None else (("address", info.address),)),
        ("device", f"{info.device} ({info.device_name})" if info.device_name else info.device),
        ("python", info.python_version),
        ("torch", info.torch_version),
        ("grpc", info.grpc_version),
        ("usable cpus", str(info.usable_cpus)),
        *(() if info.threads is None else (("threads", str(info.threads)),)),
        ("cache pool", f"{info.cache_pool_bytes:,} bytes{pages}"),
        ("dtypes", ", ".join(info.dtypes)),
        ("features", ", ".join(info.features)),
        *((name, f"{limit:,}") for name, limit in dataclasses.asdict(info.limits).items()),
        *((f"kernel {kernel.name}", kernel.description) for kernel in info.kernels),
        *((f"--{each.name.replace('_', '-')}", f"{_setting_value(each)} ({each.source})") for each in info.settings),
    ]
    return table(rows, words=2)


def _setting_value(setting: Setting) -> str:
    return "not told to callers" if setting.value is None else setting.value or "none"


def layers_text(layers: Sequence[Layer]) -> str:
    """The layers, one per line; cells for what a layer lacks are empty."""
    if not layers:
        return "no layers are loaded"
    widths = ("input", "context", "output")
    titles = ("name", "kind", "dtype", "parameters", "bytes", "version", *widths, "heads", "blocks")
    return table([titles, *map(_layer_row, layers)], words=3)


def _layer_row(layer: Layer) -> tuple[str, ...]:
    queries, keys = layer.num_query_heads, layer.num_kv_heads
    heads = f"{queries}" if keys == queries else f"{queries}/{keys}"
    width = f"{layer.head_dim}" if layer.value_dim == layer.head_dim else f"{layer.head_dim}/{layer.value_dim}"
    return (
        layer.name,
        f"{layer.kind}, causal" if layer.causal else layer.kind,
        layer.dtype,
        f"{layer.parameters:,}",
        f"{layer.bytes:,}",
        str(layer.version),
        "token ids" if layer.input_width is None else str(layer.input_width),
        _or_empty(layer.context_width),
        str(layer.output_width),
        f"{heads} × {width}",
        _or_empty(layer.blocks),
    )


def _or_empty(count: int | None) -> str:
    return "" if count is None else str(count)


def pool_text(pool: CachePool) -> str:
    """The caches, one per line, and how full the pool is."""
    if not pool.caches:
        return f"no caches are open; {room_text(pool)}"
    titles = ("name", "alias", "dtype", "heads", "layers", "tokens", "bytes", "shared", "ttl", "left")
    return f"{table([titles, *map(_cache_row, pool.caches)], words=3)}\n{room_text(pool)}"


def room_text(pool: CachePool) -> str:
    """How full the pool is."""
    return f"{pool.free_bytes:,} of {pool.bytes:,} bytes are free"


def _cache_row(cache: CacheInfo) -> tuple[str, ...]:
    width = str(cache.head_dim) if cache.value_dim == cache.head_dim else f"{cache.head_dim}/{cache.value_dim}"
    return (
        cache.name,
        repr(cache.alias or "")[1:-1],  # which nobody has checked for what a terminal would obey
        cache.dtype,
        f"{cache.num_kv_heads} × {width}",
        str(cache.layers),
        f"{max(cache.lengths, default=0):,}",
        f"{cache.bytes:,}",
        f"{cache.shared_bytes:,}",
        _duration(cache.ttl),
        _duration(cache.remaining),
    )


def _duration(seconds: float | None) -> str:
    """Seconds, with a decimal if they are few; nothing for None."""
    return "" if seconds is None else f"{seconds:,.{int(round(seconds, 1) < 10)}f} s"
