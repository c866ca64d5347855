"""The tables of kernels: the first that applies to a call computes it.

A device that has ragged kernels first packs what one of them takes; the rest is divided into calls of equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from attnserve_server.kernels import efficient_cuda, flash_cpu, varlen_cuda, written_out
from attnserve_server.kernels.bias import nothing_to_attend
from attnserve_server.kernels.call import AttentionCall, AttentionResult
from attnserve_server.kernels.ragged import RaggedKernel


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute attention, the device it is for, why it is there, and which calls it can compute.

    `heads_apart`: the results of a key head have the same bits whatever other heads a call has.
    """

    name: str
    device: str
    description: str
    applies: Callable[[AttentionCall], bool]
    attend: Callable[[AttentionCall], AttentionResult]
    heads_apart: bool = False


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        flash_cpu.NAME,
        "cpu",
        "dot-product scores with masks, biases, windows, ALiBi and sinks; fast on any CPU, no scores in memory",
        flash_cpu.applies,
        flash_cpu.attend,
        heads_apart=True,
    ),
    Kernel(
        efficient_cuda.NAME,
        "cuda",
        "dot-product scores with masks, biases, windows, ALiBi and sinks that the ragged kernels do not take",
        efficient_cuda.applies,
        efficient_cuda.attend,
    ),
    Kernel(
        written_out.NAME,
        "any",
        "everything else: softcaps, learned scores, requested scores, infinities and NaNs; float32 in float64 on a CPU",
        lambda call: True,
        written_out.attend,
    ),
)

CPU_PAGES: Final = "cpu_pages"
CPU_PAGES_DESCRIPTION: Final = (
    "up to 16 queries over the pages of a cache, dot-product scores with all options but softcaps"
)
"""A kernel without a row, because it takes no calls: it is `caches/step.py`, which reads pages in place."""

RAGGED_KERNELS: tuple[RaggedKernel, ...] = (varlen_cuda.KERNEL, efficient_cuda.RAGGED_KERNEL)
"""Kernels for CUDA that compute sequences of any lengths in one call; the first with the dtype takes what it can."""


def attend(call: AttentionCall) -> AttentionResult:
    """Computes a call by the first kernel that applies."""
    if call.query.shape[2] == 0 or (call.key.shape[2] == 0 and call.return_scores is None):
        return nothing_to_attend(call, "none") if call.return_scores is None else written_out.attend(call)
    return kernel_for(call).attend(call)


def attend_again(call: AttentionCall) -> AttentionResult:
    """Computes a call on a CPU for which the native kernel gave NaN or infinities. If the cause may be that scores left
    float32, by the kernel that all others fall back on: the first that applies might take one for -inf.
    """
    return written_out.attend(call) if written_out.overflow_in_float32(call) else attend(call)


def kernel_for(call: AttentionCall) -> Kernel:
    """The first kernel that applies to a call with Lq > 0 and S > 0."""
    device = call.query.device.type
    return next(kernel for kernel in KERNELS if kernel.device in ("any", device) and kernel.applies(call))
