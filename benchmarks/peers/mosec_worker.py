"""Mosec serving the same functions: `python -m benchmarks.peers.mosec_worker`, with mosec's own arguments.

A request's body is as `request` in mosec.py encodes it: HEADER and arrays, or just the rows of a layer's input.
"""

from __future__ import annotations

import math
import os
import struct
from typing import Any, Final

import torch
from mosec import Server, Worker  # type: ignore[import-not-found]

from benchmarks.peers.compute import HEAD_DIM, HEADS, Attention, Layer, attend, prepare

HEADER: Final = struct.Struct("<6If")
"""Hq, Hk, L, S, D; causal + 2 * whether there is a mask; scale, NaN if absent. Then query, key, value, mask."""

THREADS: Final = int(os.environ.get("ATTNSERVE_BENCH_THREADS", "1"))


class _Bytes(Worker):  # type: ignore[misc]
    """A worker whose replies are raw bytes."""

    def __init__(self) -> None:
        super().__init__()
        prepare(THREADS)

    def serialize(self, data: torch.Tensor) -> bytes:
        """An output as bytes."""
        return data.contiguous().numpy().tobytes()


class AttentionWorker(_Bytes):
    """Computes attention."""

    def deserialize(self, data: bytes) -> Attention:
        """Views of the body."""
        heads, kv_heads, length, kv_length, width, flags, scale = HEADER.unpack_from(data)
        at = HEADER.size
        tensors = []
        for shape in ((heads, length, width), *((kv_heads, kv_length, width),) * 2):
            tensors.append(torch.frombuffer(data, dtype=torch.float32, count=math.prod(shape), offset=at).view(shape))
            at += 4 * math.prod(shape)
        mask = None
        if flags & 2:
            mask = torch.frombuffer(data, dtype=torch.bool, offset=at).view(length, kv_length)
        query, key, value = tensors
        return Attention(query, key, value, mask, bool(flags & 1), None if math.isnan(scale) else scale)

    def forward(self, data: list[Attention] | Attention) -> list[torch.Tensor] | torch.Tensor:
        """Computes a batch, or a single request if batches have at most one."""
        return attend(data) if isinstance(data, list) else attend([data])[0]


class LayerWorker(_Bytes):
    """Applies the layer."""

    def __init__(self) -> None:
        super().__init__()
        self._layer = Layer(os.environ["ATTNSERVE_BENCH_WEIGHTS"])

    def deserialize(self, data: bytes) -> torch.Tensor:
        """A view of the body."""
        return torch.frombuffer(data, dtype=torch.float32).view(-1, HEADS * HEAD_DIM)

    def forward(self, data: list[torch.Tensor] | torch.Tensor) -> list[torch.Tensor] | torch.Tensor:
        """Computes a batch, or a single request if batches have at most one."""
        return self._layer(data) if isinstance(data, list) else self._layer([data])[0]


def main() -> None:
    """Serves until the process is ended."""
    server = Server()
    environment: dict[str, Any] = os.environ.copy()
    worker = LayerWorker if environment["ATTNSERVE_BENCH_MODEL"] == "layer" else AttentionWorker
    server.append_worker(
        worker,
        num=int(environment["ATTNSERVE_BENCH_WORKERS"]),
        max_batch_size=int(environment["ATTNSERVE_BENCH_BATCH"]),
        max_wait_time=int(environment["ATTNSERVE_BENCH_WAIT_MS"]),
    )
    server.run()


if __name__ == "__main__":
    main()
