"""Payloads on their way to a device."""

from __future__ import annotations

import threading

import numpy as np
import torch

from attnserve_server.devices.inputs import COPIED_ASIDE, fill


def test_payloads_lie_end_to_end() -> None:
    random = np.random.default_rng(0)
    sizes = (3, 0, COPIED_ASIDE, COPIED_ASIDE - 1, 2 * COPIED_ASIDE + 5, 1)
    payloads = [random.bytes(size) for size in sizes]
    raw = torch.zeros(sum(sizes), dtype=torch.uint8)
    fill(raw, [memoryview(payload) for payload in payloads])
    assert raw.numpy().tobytes() == b"".join(payloads)


def test_other_threads_run_while_a_large_payload_is_copied() -> None:
    """They launch what the device computes next, and receive what comes: one sees that the copy is half done."""
    size = 1 << 26
    payloads, raw = [memoryview(bytes([byte]) * size) for byte in (1, 0)], torch.zeros(size, dtype=torch.uint8)
    ends, done, seen = raw.numpy()[:: size - 1], threading.Event(), threading.Event()

    def look() -> None:
        while not done.is_set():
            if ends[0] != ends[1]:
                seen.set()

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(50):
        fill(raw, [payloads[number % 2]])
        if seen.is_set():
            break
    done.set()
    thread.join()
    assert seen.is_set()
