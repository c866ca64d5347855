"""A resident multi-head layer: callers send activations; 512 wide, 8 heads of 64, float32, causal.

Its weights are random and the same in every run: the service reads them from a file that is written for it, torch in
process uses them directly.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save_file

from attnserve import AsyncClient, Client
from attnserve._requests.operation import APPLY
from attnserve.v1 import attention_pb2 as pb
from benchmarks.peers import compute
from benchmarks.plain import Array, PlainAttention, PlainLayer, exact_attention
from benchmarks.workload import HEAD_DIM, HEADS, Batch, Result, Workload, tensor

WIDTH: Final = HEADS * HEAD_DIM
LAYER: Final = "benchmark"

_DEFINITION: Final = f"""\
[[layers]]
name = "{LAYER}"
preset = "torch.multihead_attention"
file = "benchmark.safetensors"
heads = {HEADS}
causal = true
"""


def weights() -> dict[str, Array]:
    """The layer's parameters, by the names of torch's nn.MultiheadAttention, scaled to preserve activations' size."""
    random = np.random.default_rng(512)
    shapes = {
        "in_proj_weight": (3 * WIDTH, WIDTH),
        "in_proj_bias": (3 * WIDTH,),
        "out_proj.weight": (WIDTH, WIDTH),
        "out_proj.bias": (WIDTH,),
    }
    scale = np.float32(WIDTH**-0.5)
    return {name: random.standard_normal(shape, dtype=np.float32) * scale for name, shape in shapes.items()}


@dataclass(frozen=True)
class Resident(Workload):
    """Requests of any lengths, one sequence each."""

    operation = APPLY

    @property
    def tolerance(self) -> float:
        """Three chained sums over 512 products: more than the 2e-6 of an attention alone."""
        return 1e-5

    def server_flags(self, directory: Path) -> list[str]:
        """Makes the service load the layer before it is ready."""
        save_file(weights(), directory / "benchmark.safetensors")
        definitions = directory / "layers.toml"
        definitions.write_text(_DEFINITION, "utf-8")
        return ["--layers", str(definitions)]

    def arrays(self, number: int) -> tuple[Array]:
        """The input, [L, 512], unit-normal."""
        random = np.random.default_rng(number)
        return (random.standard_normal(self.output_shape(number), dtype=np.float32),)

    def output_shape(self, number: int) -> tuple[int, ...]:
        """[L, 512]."""
        return (self.lengths[number], WIDTH)

    def plain(self, number: int) -> PlainLayer:
        """The input."""
        return PlainLayer(*self.arrays(number))

    def request(self, number: int) -> bytes:
        """An encoded ApplyRequest."""
        (input,) = self.arrays(number)
        return pb.ApplyRequest(layer=LAYER, input=tensor(input)).SerializeToString()

    def expected(self, number: int) -> Array:
        """[L, 512], float64."""
        exact = {name: array.astype(np.float64) for name, array in weights().items()}
        (input,) = self.arrays(number)
        projected = input @ exact["in_proj_weight"].T + exact["in_proj_bias"]
        query, key, value = projected.reshape(len(input), 3, HEADS, HEAD_DIM).transpose(1, 2, 0, 3)
        attended = (
            exact_attention(PlainAttention(query, key, value, causal=True)).swapaxes(0, 1).reshape(len(input), WIDTH)
        )
        return np.asarray(attended @ exact["out_proj.weight"].T + exact["out_proj.bias"])

    def batches(self) -> list[Batch]:
        """Projections over all rows in flight; attention stacked if all lengths are equal, else one by one.

        Padding instead took twice as long on 2 cores, whether the projections were padded or packed.
        """
        parameters = {name: torch.from_numpy(array) for name, array in weights().items()}
        return [Batch(chunk, partial(compute.multi_head, parameters, *self._packed(chunk))) for chunk in self.chunks()]

    def _packed(self, chunk: tuple[int, ...]) -> tuple[torch.Tensor, list[int]]:
        """The inputs of some requests end to end, and their lengths."""
        rows = np.concatenate([self.arrays(number)[0] for number in chunk])
        return torch.from_numpy(rows), [self.lengths[number] for number in chunk]

    def ask(self, client: Client, arrays: tuple[Array, ...]) -> Result:
        """Sends the arrays of a request and waits for the result."""
        return client.apply(LAYER, *arrays)

    def submit(self, client: Client, arrays: tuple[Array, ...]) -> Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        return client.submit_apply(LAYER, *arrays)

    def submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> asyncio.Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        return client.submit_apply(LAYER, *arrays)
