"""The measured workloads, by name."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from benchmarks.attention import Attention
from benchmarks.decode import Decode
from benchmarks.decoder import DecoderStep
from benchmarks.mixed import Mixed
from benchmarks.resident import Resident
from benchmarks.workload import Shape, Workload


def drawn(shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """`count` random lengths, each equally likely; the same in every run."""
    return tuple(np.random.default_rng(0).integers(shortest, longest, count, endpoint=True).tolist())


def _chosen(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` random choices of these lengths, each equally likely; the same in every run."""
    return tuple(np.random.default_rng(1).choice(lengths, count).tolist())


WORKLOADS: Final[dict[str, Workload]] = {
    workload.name: workload
    for workload in (
        Attention("S", in_flight=16, lengths=(16,) * 16),
        Attention("S1", in_flight=1, lengths=(16,)),
        Attention("M", in_flight=8, lengths=(128,) * 8),
        Attention("L", in_flight=4, lengths=(1024,) * 4),
        Resident("A", in_flight=16, lengths=(16,) * 16),
        Resident("B", in_flight=8, lengths=(128,) * 8),
        Resident("R", in_flight=8, lengths=drawn(8, 512, 32)),
        Decode("D", in_flight=1, lengths=(1,)),
        Decode("DA", in_flight=1, lengths=(1,), manner="append"),
        Decode("DS", in_flight=1, lengths=(1,), manner="send"),
        Decode("D64", in_flight=1, lengths=(64,), manner="append"),
        DecoderStep("T", in_flight=1, lengths=(1,)),
        DecoderStep("T16", in_flight=1, lengths=(16,)),
        Mixed("X", in_flight=16, lengths=_chosen((16, 40, 96, 160, 250), 32)),
    )
}
"""Attention with its keys and values in the request (S, S1, M, L), a resident layer (A, B, and R with ragged lengths),
decoder steps over a resident cache (D, DA with an append, D64 for 64 caches) or a history that is sent (DS), steps of a
resident decoder (T, T16 for 16 sequences), and attention of mixed shapes and options (X)."""

HALF, BRAIN = (Shape(heads=32, kv_heads=8, head_dim=128, dtype=dtype) for dtype in ("float16", "bfloat16"))
"""Attention as in models of some billion parameters."""
MILLION: Final = 1 << 20
"""The total tokens of one workload's caches; each token takes 4 KiB in half precision."""


def _prefill(name: str, shape: Shape, length: int, in_flight: int) -> Attention:
    return Attention(name, in_flight, (length,) * in_flight, shape=shape, device="cuda")


def _steps(name: str, sequences: int, in_flight: int, manner: Literal["attend", "append"] = "attend") -> Decode:
    """Steps of `sequences` decoders whose caches have a million tokens in total."""
    return Decode(
        name,
        in_flight,
        (sequences,) * in_flight,
        manner=manner,
        tokens=MILLION // sequences,
        shape=BRAIN,
        device="cuda",
        distinct=4,
        pool_bytes=6 << 30,
    )


CUDA_WORKLOADS: Final[dict[str, Workload]] = {
    workload.name: workload
    for workload in (
        _prefill("G1", HALF, 1, 1),
        _prefill("G128", HALF, 128, 16),
        _prefill("G1024", BRAIN, 1024, 8),
        _prefill("G4096", BRAIN, 4096, 4),
        _prefill("G16384", BRAIN, 16_384, 2),
        Decode("C1", 1, (1,), tokens=16_384, shape=BRAIN, device="cuda", pool_bytes=1 << 30),
        _steps("C64", 64, 2),
        _steps("C256", 256, 2),
        _steps("CA64", 64, 1, "append"),
        _steps("CA256", 256, 1, "append"),
    )
}
"""The same on CUDA: attention with its keys and values in the request (G), and steps of 1, 64 and 256 decoders in one
message over resident caches (C), with an append (CA)."""
