"""The definition of a workload: requests that can be sent in every way, computed in process, and checked.

In: lengths and the number in flight. Out: encoded messages for raw streams, calls of the SDK, batches for torch, and
the expected answers. Requests are numbered from 0, and sent in turn: each has contents of its own, so that an answer
that goes to the wrong caller is detected.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import ml_dtypes
import numpy as np
import torch

from attnserve import AsyncClient, AttentionResult, Client, LayerResult, _dtypes
from attnserve._requests.arrays import from_wire
from attnserve._requests.operation import Operation
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from benchmarks.plain import Array, Plain

Outputs: TypeAlias = Sequence[torch.Tensor] | torch.Tensor
Result: TypeAlias = AttentionResult[Array] | LayerResult[Array]

HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads of queries, those of keys and values, their width, and the dtype, by its name in torch and NumPy."""

    heads: int = HEADS
    kv_heads: int = HEADS
    head_dim: int = HEAD_DIM
    dtype: str = "float32"

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} heads on {self.kv_heads}"
        return f"{heads} of {self.head_dim}, {self.dtype}"

    def normal(self, random: np.random.Generator, *shape: int) -> Array:
        """A unit-normal array."""
        return random.standard_normal(shape, dtype=np.float32).astype(self.numpy, copy=False)

    def keys_and_values(self, random: np.random.Generator, tokens: int) -> tuple[Array, Array]:
        """[Hk, tokens, D] each, unit-normal."""
        key, value = (self.normal(random, self.kv_heads, tokens, self.head_dim) for _ in range(2))
        return key, value

    @property
    def numpy(self) -> np.dtype[Any]:
        """NumPy's dtype."""
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    @property
    def tolerance(self) -> float:
        """The tolerated error of an attention: that of float32, or a few roundings of large outputs."""
        return {"float32": 2e-6, "float16": 8e-3, "bfloat16": 6e-2}[self.dtype]


SMALL: Final = Shape()


def device_tensor(array: Array, device: str) -> torch.Tensor:
    """An array as a tensor on a device."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def finished(compute: Callable[[], Outputs], device: str) -> Outputs:
    """The outputs of a computation, once it is done: devices other than a CPU compute asynchronously."""
    outputs = compute()
    if device != "cpu":
        torch.cuda.synchronize()
    return outputs


# Encoded as long as a computed reply's timings, so that replies without computation have the same length.
TIMINGS = pb.Timings(decode_ns=50_000, queue_ns=100_000, staging_ns=50_000, compute_ns=500_000, encode_ns=50_000)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch for torch in process: the requests' numbers, and the call that returns their outputs in order."""

    requests: tuple[int, ...]
    compute: Callable[[], Outputs]


@dataclass(frozen=True)
class Workload(ABC):
    """Requests of some lengths, in tokens, and how many are in flight."""

    name: str
    in_flight: int
    lengths: tuple[int, ...]

    operation: ClassVar[Operation]
    """The operation that is requested of the service."""

    @property
    @abstractmethod
    def tolerance(self) -> float:
        """The tolerated difference of an output from the exact one."""

    @property
    def description(self) -> str:
        """In words."""
        shortest, longest = min(self.lengths), max(self.lengths)
        tokens = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        return f"{tokens}, {self.in_flight} in flight"

    @property
    def numbers(self) -> range:
        """The numbers of the requests."""
        return range(len(self.lengths))

    @property
    def mean_tokens(self) -> float:
        """The mean length of the requests."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def cache_bytes(self) -> int:
        """The cache pool that the service needs for this; small by default, since it counts as the service's memory."""
        return 1 << 20

    def server_flags(self, directory: Path) -> list[str]:
        """The flags that the service needs for this; their files are written into a directory."""
        del directory
        return []

    def prepare(self, address: str) -> None:  # noqa: B027 - most need nothing
        """Creates, or resets, what the requests need on the service; called before each measurement."""

    @abstractmethod
    def arrays(self, number: int) -> tuple[Array, ...]:
        """What a caller sends."""

    @abstractmethod
    def plain(self, number: int) -> Plain:
        """The request with all its inputs: what is computed by peers and by the definition."""

    @property
    def peers(self) -> bool:
        """Whether peers can serve it."""
        return True

    @abstractmethod
    def request(self, number: int) -> bytes:
        """An encoded request."""

    @abstractmethod
    def output_shape(self, number: int) -> tuple[int, ...]:
        """The shape of an output."""

    def rows(self, number: int) -> slice:
        """Which rows of an output, along its second-to-last axis, are compared with the exact ones."""
        del number
        return slice(None)

    @abstractmethod
    def expected(self, number: int) -> Array:
        """Those rows of an output, computed in float64 by the definition."""

    @abstractmethod
    def batches(self) -> list[Batch]:
        """All requests as torch computes them best in process, in batches of as many as are in flight."""

    @abstractmethod
    def ask(self, client: Client, arrays: tuple[Array, ...]) -> Result:
        """Sends the arrays of a request and waits for the result."""

    @abstractmethod
    def submit(self, client: Client, arrays: tuple[Array, ...]) -> Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""

    @abstractmethod
    def submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> asyncio.Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""

    def kind(self, number: int) -> int:
        """Requests of one kind have messages of the same length, and so do their replies."""
        return self.lengths[number]

    def reply(self, number: int) -> bytes:
        """An encoded reply as long as the service's, for a server that computes nothing."""
        shape = self.output_shape(number)
        output = tensor(np.zeros(shape, self.output_dtype))
        return self.operation.response_type(timings=TIMINGS, batch_size=1, output=output).SerializeToString()

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """The dtype of an output."""
        return np.dtype(np.float32)

    def output(self, reply: bytes) -> Array:
        """The output in an encoded reply."""
        output = self.operation.response_type.FromString(reply).output
        return from_wire("output", output.dtype, tuple(output.shape), output.data)

    def chunks(self) -> list[tuple[int, ...]]:
        """The numbers of the requests, in groups of as many as are in flight."""
        numbers = tuple(self.numbers)
        return [numbers[first : first + self.in_flight] for first in range(0, len(numbers), self.in_flight)]


@dataclass(frozen=True)
class Shaped(Workload):
    """Attention of one shape; in process, it runs on a device."""

    shape: Shape = SMALL
    device: str = "cpu"
    """Where torch in process computes, and holds what is resident before a request."""

    @property
    def tolerance(self) -> float:
        """The tolerance of the dtype."""
        return self.shape.tolerance

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """The dtype of the queries."""
        return self.shape.numpy


def tensor(array: Array) -> tensor_pb2.Tensor:
    """An array as a tensor message."""
    dtype = tensor_pb2.DataType.Name(_dtypes.WIRE[array.dtype])
    return tensor_pb2.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())
