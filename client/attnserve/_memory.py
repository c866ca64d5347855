"""Messages put together, and their memory, which the C library is to keep once it is freed.

In: the pieces of each message that is sent, and the size of each that is received. Out: the messages. By default glibc
returns memory to the system that is soon needed again, and each page then faults, and is filled with zeros, before it
is written: on a virtual machine that takes longer than all else that a client does to send a message of 1 MB
(docs/performance.md). glibc keeps more in a process that has freed a large block; so one is freed here, without ever
being written to.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import numpy as np

from attnserve._fields import Buffer

_COPIES: Final = 8
"""How many messages of one size there may be room for: some are in flight, and gRPC copies each."""
_MOST: Final = (32 << 20) - (64 << 10)
"""The largest block from which glibc learns, with room for its header. It keeps up to twice as much."""

_kept = 128 << 10
"""The size of the largest block that was freed. From the start, glibc keeps this much."""


def joined(pieces: Iterable[Buffer]) -> bytes:
    """The message that consists of these pieces."""
    message = b"".join(pieces)
    keep_memory(len(message))
    return message


def keep_memory(size: int) -> None:
    """Has the C library keep the memory of a few messages of this size. Any thread may do it; done twice, it is done.

    Where the process's environment sets what glibc keeps, that stays as it is.
    """
    global _kept
    if size * _COPIES > _kept < _MOST:
        _kept = min(1 << (size * _COPIES - 1).bit_length(), _MOST)
        with suppress(MemoryError):  # none is needed
            np.empty(_kept, np.uint8)
