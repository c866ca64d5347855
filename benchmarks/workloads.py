"""The workloads that are measured, by name."""

from __future__ import annotations

from typing import Final

import numpy as np

from benchmarks.attention import Attention
from benchmarks.decode import Decode
from benchmarks.mixed import Mixed
from benchmarks.resident import Resident
from benchmarks.workload import Workload


def drawn(shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """So many lengths, each equally likely; the same in every run."""
    return tuple(np.random.default_rng(0).integers(shortest, longest, count, endpoint=True).tolist())


def _chosen(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """So many of these lengths, each equally likely; the same in every run."""
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
        Mixed("X", in_flight=16, lengths=_chosen((16, 40, 96, 160, 250), 32)),
    )
}
"""Attention sent with its keys and values (S, S1, M, L), a resident layer (A, B, and R of ragged lengths), steps of
decoders against a resident cache (D, DA with an append, D64 for 64 caches) or a history that is sent (DS), and
attention of mixed shapes and options (X)."""
