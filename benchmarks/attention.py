"""Attention by itself: callers send queries, keys and values; 8 heads of 64, float32, causal."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnserve import AsyncClient, Client
from attnserve._operation import ATTEND
from attnserve.v1 import attention_pb2 as pb
from benchmarks.plain import Array, PlainAttention, exact_attention
from benchmarks.workload import HEAD_DIM, HEADS, Batch, Result, Workload, tensor

CHECKED_ROWS: Final = 1024


@dataclass(frozen=True)
class Attention(Workload):
    """Requests of one length, so that torch can stack them."""

    operation = ATTEND
    tolerance = 2e-6

    def arrays(self, number: int) -> tuple[Array, Array, Array]:
        """Query, key and value, [H, L, D], unit-normal."""
        random = np.random.default_rng(number)
        shape = self.output_shape(number)
        query, key, value = (random.standard_normal(shape, dtype=np.float32) for _ in range(3))
        return query, key, value

    def output_shape(self, number: int) -> tuple[int, ...]:
        """[H, L, D]."""
        return (HEADS, self.lengths[number], HEAD_DIM)

    def plain(self, number: int) -> PlainAttention:
        """The same."""
        return PlainAttention(*self.arrays(number), causal=True)

    def request(self, number: int) -> bytes:
        """An encoded AttendRequest."""
        query, key, value = map(tensor, self.arrays(number))
        return pb.AttendRequest(causal=True, query=query, key=key, value=value).SerializeToString()

    def rows(self, number: int) -> slice:
        """Some of those that are many: their scores in float64 would take gigabytes."""
        return slice(None, None, max(1, self.lengths[number] // CHECKED_ROWS))

    def expected(self, number: int) -> Array:
        """[H, some of L, D], float64."""
        return exact_attention(self.plain(number), self.rows(number))

    def batches(self) -> list[Batch]:
        """One call of torch's own attention for all that are in flight."""
        return [Batch(chunk, self._stacked(chunk)) for chunk in self.chunks()]

    def _stacked(self, chunk: tuple[int, ...]) -> partial[torch.Tensor]:
        arrays = zip(*map(self.arrays, chunk), strict=True)
        query, key, value = (torch.from_numpy(np.stack(each)) for each in arrays)
        return partial(scaled_dot_product_attention, query, key, value, is_causal=True)

    def ask(self, client: Client, arrays: tuple[Array, ...]) -> Result:
        """Sends the arrays of a request and waits for the result."""
        query, key, value = arrays
        return client.attend(query, key, value, causal=True)

    def submit(self, client: Client, arrays: tuple[Array, ...]) -> Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        query, key, value = arrays
        return client.submit(query, key, value, causal=True)

    def submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> asyncio.Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        query, key, value = arrays
        return client.submit(query, key, value, causal=True)
