"""What one request may be, whatever the load: bounds of the server that readers hold requests to.

In: what a header states. Out: nothing, or InvalidRequest with the limit, before anything is allocated. The bounds of
all requests together are `scheduling.admission`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest
from attnserve_server.requests.tensors import MAX_LENGTH, MAX_RANK, TensorSpec, check_rank

HEADER_BYTES = 1 << 16
"""What a request may have beside the contents of its tensors and the caches that it names, and more than it needs."""
REFERENCE_BYTES = 64
"""What it may have beside that for each cache."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestLimits:
    """The most axes and elements of a tensor, sequences with lengths or offsets of their own, and FLOPs of a request.

    Compared by identity: a server has one, and it is part of the key of what is remembered of headers.
    """

    max_rank: int = MAX_RANK
    max_elements: int = MAX_LENGTH
    max_sequences: int = 1 << 14
    """Each costs microseconds of the event loop."""
    max_request_flops: int = 2 * 10**13

    @property
    def max_header_bytes(self) -> int:
        """What a request may have beside the contents of its tensors."""
        return HEADER_BYTES + REFERENCE_BYTES * self.max_sequences

    def check_header(self, header: bytes) -> None:
        """Raises InvalidRequest if there is too much of a request beside the contents of its tensors: to parse it takes
        the event loop, and 16 times the memory where it is all one shape.
        """
        if len(header) > self.max_header_bytes:
            expected = f"at most {self.max_header_bytes} bytes beside the contents of tensors"
            raise InvalidRequest("", expected, f"{len(header)} bytes", LIMIT_EXCEEDED)

    def check_tensors(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raises InvalidRequest if a tensor has too many axes or elements."""
        for path, spec in tensors.items():
            check_rank(f"{path}.shape", spec.shape, self.max_rank)
            if (elements := prod(spec.shape)) > self.max_elements:
                raise InvalidRequest(f"{path}.shape", f"at most {self.max_elements} elements", elements, LIMIT_EXCEEDED)

    def check_sequences(self, field: str, sequences: int) -> None:
        """Raises InvalidRequest if there are too many sequences."""
        if sequences > self.max_sequences:
            raise InvalidRequest(field, f"at most {self.max_sequences} sequences", sequences, LIMIT_EXCEEDED)

    def check_flops(self, flops: int) -> None:
        """Raises InvalidRequest if a request costs too much, in operations of plain attention."""
        if flops > self.max_request_flops:
            expected = f"a request of at most {self.max_request_flops} FLOPs"
            raise InvalidRequest("", expected, f"{flops} FLOPs", LIMIT_EXCEEDED)


DEFAULT_LIMITS = RequestLimits()

CPU_REQUEST_FLOPS = 5 * 10**11
"""What one request may cost on a CPU where nothing is configured, for each thread: some 10 s."""


def default_request_flops(threads: int, max_flops: int) -> int:
    """The most FLOPs of one request where nothing is configured, on a CPU of so many threads, or (0) on a GPU: seconds
    of a CPU, and all that may be admitted on a GPU.
    """
    return min(max_flops, CPU_REQUEST_FLOPS * threads) if threads else max_flops
