"""How large one request may be, whatever the load: bounds of the server that readers check.

In: what a header states. Out: nothing, or InvalidRequest with the limit, before anything is allocated. Bounds on all
requests together are in `scheduling.admission`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest
from attnserve_server.requests.tensors import TensorSpec, check_rank

HEADER_BYTES = 1 << 16
"""Bytes allowed besides the contents of a request's tensors and the caches that it names; more than it needs."""
REFERENCE_BYTES = 64
"""Further bytes allowed for each cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestLimits:
    """The most axes and elements of a tensor, sequences with lengths or offsets of their own, and FLOPs of a request.

    Compared by identity: a server has one, which is part of the key under which headers are remembered.
    """

    max_rank: int
    max_elements: int
    max_sequences: int
    """Each costs microseconds of the event loop."""
    max_request_flops: int

    @property
    def max_header_bytes(self) -> int:
        """Bytes allowed besides the contents of a request's tensors."""
        return HEADER_BYTES + REFERENCE_BYTES * self.max_sequences

    def check_header(self, header: bytes) -> None:
        """Raises InvalidRequest if a request has too many bytes besides the contents of its tensors: parsing them takes
        time of the event loop, and 16 times the memory where they are all one shape.
        """
        if len(header) > self.max_header_bytes:
            expected = f"at most {self.max_header_bytes} bytes beside the contents of tensors"
            raise InvalidRequest("", expected, f"{len(header)} bytes", LIMIT_EXCEEDED, limit="max_header_bytes")

    def check_tensors(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raises InvalidRequest if a tensor has too many axes or elements."""
        for path, spec in tensors.items():
            check_rank(f"{path}.shape", spec.shape, self.max_rank)
            if (elements := prod(spec.shape)) > self.max_elements:
                expected = f"at most {self.max_elements} elements"
                raise InvalidRequest(f"{path}.shape", expected, elements, LIMIT_EXCEEDED, limit="max_elements")

    def check_sequences(self, field: str, sequences: int, *, or_more: bool = False) -> None:
        """Raises InvalidRequest if there are too many sequences; `or_more`, if they have not all been counted."""
        if sequences > self.max_sequences:
            expected, found = f"at most {self.max_sequences} sequences", "more" if or_more else sequences
            raise InvalidRequest(field, expected, found, LIMIT_EXCEEDED, limit="max_sequences")

    def check_flops(self, flops: int) -> None:
        """Raises InvalidRequest if a request costs too much, in operations of plain attention."""
        if flops > self.max_request_flops:
            expected = f"a request of at most {self.max_request_flops} FLOPs"
            raise InvalidRequest("", expected, f"{flops} FLOPs", LIMIT_EXCEEDED, limit="max_request_flops")


CPU_REQUEST_FLOPS = 5 * 10**11
"""What one request may cost on a CPU if nothing is configured, for each thread: some 10 s."""


def default_request_flops(threads: int, max_flops: int) -> int:
    """The most FLOPs of one request if nothing is configured: seconds of work on a CPU of that many threads, and all
    that may be admitted on a GPU (`threads` 0).
    """
    return min(max_flops, CPU_REQUEST_FLOPS * threads) if threads else max_flops
