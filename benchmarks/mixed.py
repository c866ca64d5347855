"""Attention of mixed shapes and options, as from many kinds of callers; requests in flight may all differ."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from attnserve import AsyncClient, Client
from attnserve._requests.operation import ATTEND
from attnserve.v1 import attention_pb2 as pb
from benchmarks.peers import compute
from benchmarks.plain import Array, PlainAttention, exact_attention
from benchmarks.workload import HEAD_DIM, HEADS, SMALL, Batch, Result, Workload, tensor

FEW_HEADS = 2


@dataclass(frozen=True)
class Mixed(Workload):
    """Requests of any lengths; of four, two are causal and one has a mask; heads and scale vary, too.

    A request's number determines its contents.
    """

    operation = ATTEND
    tolerance = SMALL.tolerance

    @property
    def description(self) -> str:
        """In words."""
        return f"{super().description}; causal, masked or open, 8 or 2 heads of keys, scales of their own"

    def plain(self, number: int) -> PlainAttention:
        """Unit-normal arrays, and options drawn with them."""
        random = np.random.default_rng((17, number))
        length, kv_heads = self.lengths[number], int(random.choice((HEADS, FEW_HEADS)))
        query = random.standard_normal((HEADS, length, HEAD_DIM), dtype=np.float32)
        key, value = (random.standard_normal((kv_heads, length, HEAD_DIM), dtype=np.float32) for _ in range(2))
        kind = number % 4
        mask = (random.random((length, length)) < 0.8) | np.eye(length, dtype=bool) if kind == 1 else None
        scale = 0.1 if random.random() < 0.3 else None
        return PlainAttention(query, key, value, mask, causal=kind in (0, 2), scale=scale)

    def arrays(self, number: int) -> tuple[Any, ...]:
        """Query, key and value, and the SDK's options `mask`, `causal` and `scale`."""
        return tuple(self.plain(number))

    def kind(self, number: int) -> int:
        """Every request is of a kind of its own."""
        return number

    def output_shape(self, number: int) -> tuple[int, ...]:
        """[H, L, D]."""
        return (HEADS, self.lengths[number], HEAD_DIM)

    def request(self, number: int) -> bytes:
        """An encoded AttendRequest."""
        problem = self.plain(number)
        query, key, value = map(tensor, problem[:3])
        mask = None if problem.mask is None else tensor(problem.mask)
        return pb.AttendRequest(
            causal=problem.causal, scale=problem.scale, query=query, key=key, value=value, mask=mask
        ).SerializeToString()

    def expected(self, number: int) -> Array:
        """[H, L, D], float64."""
        return exact_attention(self.plain(number))

    def batches(self) -> list[Batch]:
        """As many requests as are in flight; those of the same shapes and options in one call of torch's attention."""
        return [
            Batch(chunk, partial(compute.attend, [self._problem(each) for each in chunk])) for chunk in self.chunks()
        ]

    def _problem(self, number: int) -> compute.Attention:
        problem = self.plain(number)
        query, key, value = map(torch.from_numpy, problem[:3])
        mask = None if problem.mask is None else torch.from_numpy(problem.mask)
        return compute.Attention(query, key, value, mask, problem.causal, problem.scale)

    def ask(self, client: Client, arrays: tuple[Any, ...]) -> Result:
        """Sends a request and waits for the result."""
        query, key, value, mask, causal, scale = arrays
        return client.attend(query, key, value, mask=mask, causal=causal, scale=scale)

    def submit(self, client: Client, arrays: tuple[Any, ...]) -> Future[Any]:
        """Sends a request; the future is of a `Result`."""
        query, key, value, mask, causal, scale = arrays
        return client.submit(query, key, value, mask=mask, causal=causal, scale=scale)

    def submit_async(self, client: AsyncClient, arrays: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Sends a request; the future is of a `Result`."""
        query, key, value, mask, causal, scale = arrays
        return client.submit(query, key, value, mask=mask, causal=causal, scale=scale)
