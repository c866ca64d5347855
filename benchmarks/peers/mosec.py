"""Mosec: started in its virtual environment, and called by HTTP requests that are encoded beforehand."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Final

import numpy as np

from benchmarks import raw
from benchmarks.arrivals import Arrivals
from benchmarks.meters import Meter
from benchmarks.peers.peer import KEEPING_MEMORY, Peer, free_ports, model_of
from benchmarks.plain import Array, Plain, PlainAttention
from benchmarks.servers import Running, started
from benchmarks.workload import Workload

HEADER: Final = struct.Struct("<6If")
"""The header before the arrays in a body: Hq, Hk, L, S, D, flags, scale; as `mosec_worker.py` reads it."""
MAX_REQUEST_BYTES: Final = 1 << 30
TIMEOUT_MS: Final = 60_000


def request(problem: Plain) -> bytes:
    """A complete HTTP request."""
    if isinstance(problem, PlainAttention):
        (heads, length, width), (kv_heads, kv_length, _) = problem.query.shape, problem.key.shape
        flags = problem.causal + 2 * (problem.mask is not None)
        scale = np.nan if problem.scale is None else problem.scale
        arrays = [problem.query, problem.key, problem.value, *([] if problem.mask is None else [problem.mask])]
        pieces = [HEADER.pack(heads, kv_heads, length, kv_length, width, flags, scale)]
        pieces += [array.tobytes() for array in arrays]
    else:
        pieces = [problem.input.tobytes()]
    body = b"".join(pieces)
    head = f"POST /inference HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def http(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Encoded requests, one at a time on each of as many connections as there are in flight; no body is decoded."""
    requests = [request(workload.plain(number)) for number in workload.numbers]
    await raw.http(address, requests, arrivals, meter)


class Mosec(Peer):
    """Mosec."""

    name = "Mosec"
    packages = ("mosec", "torch")
    settings: ClassVar = {"workers": 1, "batch": 64, "wait_ms": 1, "threads": 1}
    description = (
        "Mosec: HTTP, bodies of bytes, dynamic batching with the shortest wait that it has, requests of different "
        "shapes in one batch, torch in the workers"
    )
    loads: ClassVar = {"http": http}

    @contextmanager
    def serve(self, problem: Plain, settings: Mapping[str, int], weights: Path, directory: Path) -> Iterator[Running]:
        """Serves one of the functions."""
        (port,) = free_ports(1)
        environment = {
            **os.environ,
            **KEEPING_MEMORY,
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "ATTNSERVE_BENCH_MODEL": model_of(problem),
            "ATTNSERVE_BENCH_WEIGHTS": str(weights),
            **{f"ATTNSERVE_BENCH_{name.upper()}": str(value) for name, value in settings.items()},
        }
        # Paths of sockets have a bound, which a folder in `directory` may exceed.
        with TemporaryDirectory() as sockets:
            command = [
                *(str(self.environment / "bin" / "python"), "-m", "benchmarks.peers.mosec_worker"),
                *("--address", "127.0.0.1", "--port", str(port), "--log-level", "error"),
                *("--path", sockets, "--max-request-size", str(MAX_REQUEST_BYTES)),
                *("--timeout", str(TIMEOUT_MS)),
            ]
            address = f"127.0.0.1:{port}"
            with started(
                command,
                environment,
                directory / "log",
                f"http://{address}/",
                address=address,
                metrics=f"http://{address}/metrics",
                batch_metrics=("mosec_service_batch_size_count", "mosec_service_batch_size_sum"),
            ) as found:
                yield found

    def output(self, shape: tuple[int, ...], reply: bytes) -> Array:
        """The output in a response's body, which does not include the shape."""
        found = np.frombuffer(reply, np.float32)
        return found.reshape(shape) if found.size == np.prod(shape) else found
