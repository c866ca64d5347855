"""The table of kernels: the first that applies to a call computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnserve_server.kernels import flash_cpu, math
from attnserve_server.kernels.call import AttentionCall, AttentionResult


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute attention, the device it is for, why it is there, and which calls it can compute."""

    name: str
    device: str
    description: str
    applies: Callable[[AttentionCall], bool]
    attend: Callable[[AttentionCall], AttentionResult]


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        flash_cpu.NAME,
        "cpu",
        "dot-product scores with masks, biases, windows, ALiBi and sinks; the fastest on a CPU, no scores in memory",
        flash_cpu.applies,
        flash_cpu.attend,
    ),
    Kernel(
        math.NAME,
        "any",
        "everything else: softcaps, learned scores, requested scores, infinities and NaNs; float32 in float64 on a CPU",
        lambda call: True,
        math.attend,
    ),
)


def attend(call: AttentionCall) -> AttentionResult:
    """Computes a call by the first kernel that applies."""
    if call.query.shape[2] == 0 or (call.key.shape[2] == 0 and call.return_scores is None):
        return flash_cpu.nothing_to_attend(call, "none") if call.return_scores is None else math.attend(call)
    for kernel in KERNELS:
        if kernel.applies(call):
            return kernel.attend(call)
    raise AssertionError("the last kernel applies to every call")
