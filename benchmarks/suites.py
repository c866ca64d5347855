"""What is measured on a device: workloads and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.curves import CUDA_CURVES, CURVES, Growing
from benchmarks.workload import Workload
from benchmarks.workloads import CUDA_WORKLOADS, WORKLOADS


@dataclass(frozen=True)
class Suite:
    """What is measured on a device; `opened` names the workloads that also have open loops."""

    workloads: Mapping[str, Workload]
    curves: Sequence[Growing]
    opened: Sequence[str]


SUITES: Final = {
    "cpu": Suite(WORKLOADS, CURVES, ("X",)),
    "cuda": Suite(CUDA_WORKLOADS, CUDA_CURVES, ("G128",)),
}
"""The suites by device."""
