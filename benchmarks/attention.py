"""Plain attention: callers send queries, keys and values; causal by default."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from torch.nn.functional import scaled_dot_product_attention

from attnserve import AsyncClient, Client
from attnserve._requests.operation import ATTEND
from attnserve.v1 import attention_pb2 as pb
from benchmarks.plain import Array, PlainAttention, exact_attention
from benchmarks.workload import Batch, Outputs, Result, Shaped, device_tensor, finished, tensor

CHECKED_ROWS: Final = 256


@dataclass(frozen=True)
class Attention(Shaped):
    """Requests of the same length, so that torch can stack them."""

    causal: bool = True

    operation = ATTEND

    def arrays(self, number: int) -> tuple[Array, Array, Array]:
        """Query [H, L, D], key and value [Hk, L, D], unit-normal."""
        random, shape, length = np.random.default_rng(number), self.shape, self.lengths[number]
        return shape.normal(random, shape.heads, length, shape.head_dim), *shape.keys_and_values(random, length)

    def output_shape(self, number: int) -> tuple[int, ...]:
        """[H, L, D]."""
        return (self.shape.heads, self.lengths[number], self.shape.head_dim)

    def plain(self, number: int) -> PlainAttention:
        """The arrays of a request."""
        return PlainAttention(*self.arrays(number), causal=self.causal)

    def request(self, number: int) -> bytes:
        """An encoded AttendRequest."""
        query, key, value = map(tensor, self.arrays(number))
        return pb.AttendRequest(causal=self.causal, query=query, key=key, value=value).SerializeToString()

    def rows(self, number: int) -> slice:
        """At most some hundreds of rows: the scores of all in float64 would take gigabytes."""
        return slice(None, None, max(1, self.lengths[number] // CHECKED_ROWS))

    def expected(self, number: int) -> Array:
        """[H, some of L, D], float64."""
        return exact_attention(self.plain(number), self.rows(number))

    def batches(self) -> list[Batch]:
        """One call of torch's own attention for all requests in flight."""
        return [Batch(chunk, self._stacked(chunk)) for chunk in self.chunks()]

    def _stacked(self, chunk: tuple[int, ...]) -> partial[Outputs]:
        arrays = zip(*map(self.arrays, chunk), strict=True)
        query, key, value = (device_tensor(np.stack(each), self.device) for each in arrays)
        gqa = self.shape.heads != self.shape.kv_heads
        call = partial(scaled_dot_product_attention, query, key, value, is_causal=self.causal, enable_gqa=gqa)
        return partial(finished, call, self.device)

    def ask(self, client: Client, arrays: tuple[Array, ...]) -> Result:
        """Sends the arrays of a request and waits for the result."""
        query, key, value = arrays
        return client.attend(query, key, value, causal=self.causal)

    def submit(self, client: Client, arrays: tuple[Array, ...]) -> Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        query, key, value = arrays
        return client.submit(query, key, value, causal=self.causal)

    def submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> asyncio.Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        query, key, value = arrays
        return client.submit(query, key, value, causal=self.causal)
