"""Puts messages together, and has the C library keep their memory when it is freed.

In: the pieces of each message that is sent, and the size of each that is received. Out: the messages.

By default glibc returns freed memory to the system, although it is soon needed again. Each page then faults, and is
filled with zeros, before it is written. On a virtual machine that takes longer than all else that a client does to send
a message of 1 MB (docs/performance.md). glibc keeps more in a process that has once freed a large block. So one is
freed here, without ever being written to.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import numpy as np

from attnserve._fields import Buffer

_COPIES: Final = 8
"""For how many messages of one size memory is kept: some are in flight, and gRPC copies each."""
_MOST: Final = (32 << 20) - (64 << 10)
"""The largest block after which glibc keeps more, less room for its header. It then keeps up to twice as much."""

_kept = 128 << 10
"""The size of the largest block that was freed. From the start, glibc keeps this much."""


def joined(pieces: Iterable[Buffer]) -> bytes:
    """The message that consists of these pieces."""
    message = b"".join(pieces)
    keep_memory(len(message))
    return message


def keep_memory(size: int) -> None:
    """Has the C library keep the memory of a few messages of this size. Any thread may call this, also at once.

    It changes nothing if the process's environment sets how much glibc keeps.
    """
    global _kept
    if size * _COPIES > _kept < _MOST:
        _kept = min(1 << (size * _COPIES - 1).bit_length(), _MOST)
        with suppress(MemoryError):  # without it, messages only take longer
            np.empty(_kept, np.uint8)
