"""A decoder in this process with caches for it, and random decoders: requests run as the engine runs them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import random_layers as make
import torch
from stores import store_of

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.layer import Placement
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.resident import Resident, Residents
from attnserve_server.layers.specification import Dtype, Embedding, FeedForward, Norm, Rotary, Transformer
from attnserve_server.layers.transformer import TransformerLayer
from attnserve_server.native.decoders import Step

PAGES = 2000
FOREVER = 0.0


class Part(NamedTuple):
    """A sequence of a request: rows [L, width] that continue a cache. The mask is as in `Resident`."""

    cache: Cache
    rows: torch.Tensor
    mask: torch.Tensor | None = None


class Decoding:
    """A decoder with random parameters on a device, and caches with pages of some tokens.

    `stepped` has, for each attempt to compute requests in one call, how many rows it had, and whether it succeeded.
    """

    def __init__(
        self, device: CpuDevice, architecture: Transformer, dtype: Dtype, page_tokens: int = 4, storage: Any = None
    ) -> None:
        self.stepped: list[tuple[int, bool]] = []
        layer = make.layer_of(architecture, make.random_parameters(architecture, 1, dtype), device, dtype)
        assert isinstance(layer, TransformerLayer)
        self.layer, own = layer, architecture.block.self_attention
        if layer._decoder is not None:
            layer._decoder._compute = self._counted(layer._decoder._compute)
        self.shape = CacheShape(own.kv_heads, own.head_dim, own.value_dim, architecture.blocks, storage or dtype)
        half = page_tokens * own.kv_heads * max(own.head_dim, own.value_dim) * self.shape.item_bytes
        page_bytes = 2 * -(-half // CACHE_LINE) * CACHE_LINE
        self.store = store_of(PAGES, PAGES, page_bytes=page_bytes)
        self.pool = PagePool.of(device, PAGES * page_bytes, page_bytes)

    def _counted(self, compute: NativeCompute) -> Any:
        def counted(given: Step, flops: int) -> torch.Tensor | None:
            found = compute.step(given, flops)
            self.stepped.append((len(given.rows), found is not None))
            return found

        return SimpleNamespace(step=counted)

    def create(self) -> Cache:
        """An empty cache."""
        return self.store.create(self.shape, None, FOREVER)

    def fork(self, cache: Cache) -> Cache:
        """One that shares everything."""
        return self.store.fork_one(cache, None, FOREVER)

    def run(self, *requests: Sequence[Part], by_blocks: bool = False) -> list[torch.Tensor]:
        """The outputs of all parts of requests, which are computed together; `by_blocks`: not in one call."""
        changes, residents, inputs = [], [], []
        for parts in requests:
            blocks = range(self.shape.layers)
            before = [part.cache.length(0) for part in parts]
            appends = [(part.cache, block, len(part.rows)) for part in parts for block in blocks if len(part.rows)]
            placed = iter(())
            if appends:
                changes.append(self.store.reserve(appends, FOREVER))
                placed = iter(self.store.place(changes[-1], FOREVER))
            residents.append([self._resident(part, length, placed) for part, length in zip(parts, before, strict=True)])
            lengths = [len(part.rows) for part in parts]
            inputs.append(LayerInput(input=torch.cat([part.rows for part in parts]), lengths=lengths, offsets=before))
        decoder = self.layer._decoder
        self.layer._decoder = None if by_blocks else decoder
        try:
            outputs = self.layer.run(inputs, Residents(self.pool, residents))
        except MemoryError:
            for change in changes:
                self.store.undo(change)
            raise
        finally:
            self.layer._decoder = decoder
            for change in changes:
                self.store.cancel(change)
        pairs = zip(outputs, inputs, strict=True)
        return [part for output, given in pairs for part in torch.split(output.output, given.lengths)]

    def _resident(self, part: Part, before: int, placed: Any) -> Resident:
        blocks = range(self.shape.layers)
        placements = [next(placed) if len(part.rows) else Placement([], []) for _ in blocks]
        tables = [part.cache.table(block) for block in blocks]
        return Resident(part.cache.shape, before + len(part.rows), tables, placements, part.mask)

    def finite(self, cache: Cache) -> list[bool]:
        """Whether all pages of a layer of a cache are known to be finite, for each layer."""
        pages = [np.array(cache.pages(block), np.int32) for block in range(self.shape.layers)]
        return [self.pool.finite.leading(each) == len(each) for each in pages]


def decoder(width: int = 32, blocks: int = 2, crossed: bool = False, **fields: Any) -> Transformer:
    """A stack of pre-norm blocks; `fields` are those of its self-attention."""
    own = make.attention(width, 4, **({"kv_heads": 2, "head_dim": 8, "causal": True} | fields))
    forward = FeedForward(width=width, hidden=48, activation="silu", gated=True)
    norm = Norm(kind="rms", width=width, epsilon=1e-6, bias=False)
    block = make.block(width, 4, crossed=crossed, self_attention=own, feed_forward=forward, norm=norm, pre_norm=True)
    return Transformer(blocks=blocks, block=block, final_norm=norm)


def random_decoder(random: Random) -> Transformer:
    """One that the library steps, with any of the options that decoders have."""
    width, heads = random.choice((16, 48, 64)), random.choice((1, 2, 4))
    kv_heads, head_dim = random.choice([n for n in (1, 2, 4) if heads % n == 0]), random.choice((8, 20, 24))
    norm = Norm(kind=random.choice(("rms", "layer")), width=width, epsilon=1e-5)
    rotary = Rotary(width=2 * random.randint(1, head_dim // 2), base=1e4, interleaved=random.random() < 0.5, offset=2)
    own = make.attention(
        width,
        heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=random.choice((16, 32)),
        causal=True,
        alibi=tuple(2.0**-n for n in range(heads)) if random.random() < 0.3 else (),
        rotary=rotary if random.random() < 0.5 else None,
        window=random.choice(((-1, -1), (-1, -1), (3, -1), (20, -1))),
        softcap=random.choice((0.0, 0.0, 5.0)),
    )
    forward = FeedForward(
        width=width,
        hidden=random.choice((16, 45, 300)),
        activation=random.choice(("relu", "gelu", "gelu_tanh", "silu")),
        gated=random.random() < 0.5,
    )
    block = make.block(
        width, heads, self_attention=own, feed_forward=forward, norm=norm, pre_norm=random.random() < 0.5
    )
    return Transformer(
        blocks=random.choice((1, 2, 3)),
        block=block,
        embedding=Embedding(width=width, sinusoidal=True) if random.random() < 0.2 else None,
        final_norm=norm if random.random() < 0.6 else None,
    )
