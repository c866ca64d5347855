"""A step of a decoder over a history: one query each for some sequences.

The history is resident in caches, one per sequence, or is sent with every request. Steps that append one token to each
cache attend to the history only, so that computation and results stay the same while the caches grow.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnserve import AsyncClient, Cache, Client
from attnserve._requests.operation import ATTEND
from attnserve.v1 import attention_pb2 as pb
from benchmarks.caches import SequenceCaches
from benchmarks.plain import Array, PlainAttention, exact_attention
from benchmarks.workload import (
    TIMINGS,
    Batch,
    Outputs,
    Result,
    Shape,
    Shaped,
    device_tensor,
    finished,
    tensor,
)

HISTORY: Final = 2048
"""The number of tokens before a step, unless a workload says otherwise."""
CHUNK: Final = 16_384
"""The most tokens that are appended at once."""


@lru_cache(maxsize=4)
def history(shape: Shape, tokens: int, sequence: int) -> tuple[Array, Array]:
    """The keys and values of a sequence, [Hk, tokens, D], unit-normal."""
    return shape.keys_and_values(np.random.default_rng((tokens, sequence)), tokens)


def queries(shape: Shape, number: int, count: int, heads: int) -> Array:
    """The queries of a request, or the keys and values appended with them, [B, heads, 1, D], unit-normal."""
    return shape.normal(np.random.default_rng(number), count, heads, 1, shape.head_dim)


@dataclass(frozen=True)
class Decode(Shaped):
    """Requests of `lengths` sequences each, with a query of one token each, all over the same histories."""

    manner: Literal["attend", "append", "send"] = "attend"
    tokens: int = HISTORY
    """How many tokens each sequence has before the step."""
    distinct: int = 1 << 20
    """How many of the histories differ."""
    pool_bytes: int = 1 << 30
    _caches: SequenceCaches = field(default_factory=SequenceCaches, init=False, compare=False, repr=False)

    operation = ATTEND

    @property
    def cache_bytes(self) -> int:
        """Room for the histories, and for what is appended; if they are sent, none is needed."""
        return super().cache_bytes if self.manner == "send" else self.pool_bytes

    @property
    def description(self) -> str:
        """In words."""
        what = {
            "attend": f"1 query to a cache of {self.tokens:,} tokens",
            "append": f"append 1 token to a cache of {self.tokens:,}, 1 query to it",
            "send": f"1 query to {self.tokens:,} tokens that are sent",
        }[self.manner]
        count = max(self.lengths)
        return what if count == 1 else f"{count} times in one message: {what}"

    def sequences(self, number: int) -> range:
        """The sequences of a request."""
        return range(self.lengths[number])

    def history(self, sequence: int) -> tuple[Array, Array]:
        """The keys and values of a sequence, [Hk, tokens, D]."""
        return history(self.shape, self.tokens, sequence % self.distinct)

    def prepare(self, address: str) -> None:
        """Creates the caches, or cuts off what has been appended to them."""
        if self.manner != "send":
            self._caches.prepare(address, max(self.lengths), self.tokens, self._filled)

    def _filled(self, client: Client, sequence: int) -> Cache:
        cache = client.create_cache(self.shape.kv_heads, self.shape.head_dim, dtype=self.shape.dtype)
        for begin in range(0, self.tokens, CHUNK):
            cache.append(*(part[:, begin : begin + CHUNK] for part in self.history(sequence)))
        return cache

    def arrays(self, number: int) -> tuple[Array, ...]:
        """Query [H, 1, D] and, unless the step only attends, key and value; with a batch axis for several sequences."""
        sequences = self.sequences(number)
        query = queries(self.shape, number, len(sequences), self.shape.heads)
        if self.manner == "attend":
            arrays: tuple[Array, ...] = (query,)
        elif self.manner == "append":
            appended = queries(self.shape, number, len(sequences), self.shape.kv_heads)
            arrays = (query, -appended, appended)
        else:
            arrays = (query, *map(np.stack, zip(*map(self.history, sequences), strict=True)))
        return arrays if len(sequences) > 1 else tuple(array[0] for array in arrays)

    @property
    def peers(self) -> bool:
        """Only for one sequence without an append: peers have no caches, and are sent the history of 8 MiB."""
        return max(self.lengths) == 1 and self.manner != "append"

    def plain(self, number: int) -> PlainAttention:
        """The query and the history of one sequence."""
        (sequence,) = self.sequences(number)
        return PlainAttention(queries(self.shape, number, 1, self.shape.heads)[0], *self.history(sequence))

    def output_shape(self, number: int) -> tuple[int, ...]:
        """[H, 1, D], with a batch axis before that for several sequences."""
        count = self.lengths[number]
        one = (self.shape.heads, 1, self.shape.head_dim)
        return one if count == 1 else (count, *one)

    def request(self, number: int) -> bytes:
        """An encoded AttendRequest."""
        fields: dict[str, Any] = dict(zip(("query", "key", "value"), map(tensor, self.arrays(number)), strict=False))
        sequences = self.sequences(number)
        if self.manner == "append":
            fields["kv_lengths"] = tensor(self._kv_lengths(number))
        names = [] if self.manner == "send" else self._caches.names(len(sequences))
        return pb.AttendRequest(caches=[pb.CacheReference(name=name) for name in names], **fields).SerializeToString()

    def reply(self, number: int) -> bytes:
        """An encoded reply as long as the service's."""
        output = tensor(np.zeros(self.output_shape(number), self.output_dtype))
        lengths = [] if self.manner == "send" else [self.tokens] * self.lengths[number]
        reply = pb.AttendResponse(timings=TIMINGS, batch_size=1, output=output, cache_lengths=lengths)
        return reply.SerializeToString()

    def expected(self, number: int) -> Array:
        """As `output_shape`, float64; sequences with the same history are computed together, once converted."""
        sequences = self.sequences(number)
        query = queries(self.shape, number, len(sequences), self.shape.heads)
        outputs = np.empty((len(sequences), self.shape.heads, 1, self.shape.head_dim))
        for first in sequences[: self.distinct]:
            own = slice(first, None, self.distinct)
            together = PlainAttention(query[own, :, 0].swapaxes(0, 1), *self.history(first))
            outputs[own, :, 0] = exact_attention(together).swapaxes(0, 1)
        return outputs.reshape(self.output_shape(number))

    def batches(self) -> list[Batch]:
        """One call of torch's own attention per request, over the history without the appended token."""
        return [Batch((number,), self._in_process(number)) for number in self.numbers]

    def _in_process(self, number: int) -> partial[Outputs]:
        sequences, shape = self.sequences(number), self.shape
        key, value = _stacked(shape, self.tokens, tuple(each % self.distinct for each in sequences), self.device)
        query = device_tensor(queries(shape, number, len(sequences), shape.heads), self.device)
        # Query heads that share a key head become queries of one head: torch's kernels are faster that way.
        query = query.view(len(sequences), shape.kv_heads, -1, shape.head_dim)
        return partial(finished, partial(_attend, query, key, value, self.output_shape(number)), self.device)

    def ask(self, client: Client, arrays: tuple[Array, ...]) -> Result:
        """Sends the arrays of a request and waits for the result."""
        if self.manner == "send":
            return client.attend(*arrays)
        return client.attend(*arrays, caches=self._caches.of(client), **self._options(arrays))

    def submit(self, client: Client, arrays: tuple[Array, ...]) -> Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        if self.manner == "send":
            return client.submit(*arrays)
        return client.submit(*arrays, caches=self._caches.of(client), **self._options(arrays))

    def submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> asyncio.Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        if self.manner == "send":
            return client.submit(*arrays)
        return asyncio.ensure_future(self._submit_async(client, arrays))

    async def _submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> Result:
        caches = await self._caches.of_async(client)
        result: Result = await client.attend(*arrays, caches=caches, **self._options(arrays))
        return result

    def _options(self, arrays: tuple[Array, ...]) -> dict[str, Any]:
        return {"kv_lengths": self._kv_lengths(0)} if len(arrays) > 1 else {}

    def _kv_lengths(self, number: int) -> Array:
        return np.full(self.lengths[number], self.tokens, np.int64)


@lru_cache(maxsize=2)
def _stacked(shape: Shape, tokens: int, sequences: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The histories of sequences, [B, Hk, tokens, D] each, on a device."""
    key, value = (
        torch.empty(
            len(sequences), shape.kv_heads, tokens, shape.head_dim, dtype=getattr(torch, shape.dtype), device=device
        )
        for _ in range(2)
    )
    for place, sequence in enumerate(sequences):
        for tensors, part in zip((key, value), history(shape, tokens, sequence), strict=True):
            tensors[place] = device_tensor(part, device)
    return key, value


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [scaled_dot_product_attention(query, key, value).view(shape)]
