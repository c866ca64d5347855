"""Callers of a server whose metrics are scraped, and what they saw: replies with their times, batches and tokens."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from attnserve import AttentionResult, Cache, Client, LayerResult

Result = AttentionResult[Any] | LayerResult[Any]

LAYER = "score"
WIDTH = 8
BURST = 8
"""Calls in flight at once."""
TRUNCATE_EVERY = 8
"""Bursts that append to a cache before it is truncated again."""
_PAUSE_S = 0.02
_DEFINITION = f"""
[[layers]]
name = "{LAYER}"
kind = "general"
file = "score.safetensors"
parameters.score.weight = "weight"
"""


def write_layer(directory: Any) -> str:
    """Writes a layer and its definition; returns the definition's path."""
    from safetensors.numpy import save_file

    save_file({"weight": np.eye(WIDTH, dtype=np.float32)}, directory / "score.safetensors")
    (directory / "layers.toml").write_text(_DEFINITION)
    return str(directory / "layers.toml")


class Reply(NamedTuple):
    """One answered call; times are in seconds since the epoch."""

    operation: str
    sent_at: float
    at: float
    tokens: int
    batch_size: int
    device: float
    """Its share of the device's time, in seconds; the shares of a batch add up to the batch's time."""
    in_server: float
    """Time in the server in seconds, by the phases in the reply."""


def arrays(*shape: int) -> list[Any]:
    """Query, key and value."""
    return list(np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32))


class Traffic:
    """Callers of one server."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.replies: list[Reply] = []
        self._lock = threading.Lock()

    def send(self, operation: str, tokens: int, submit: Callable[[], Future[Any]]) -> Future[Any]:
        """Sends a call and records its reply."""
        sent_at = time.time()
        future = submit()

        def note(done: Future[Any]) -> None:
            at, result = time.time(), done.result()
            timings = result.timings
            phases = timings.decode + timings.queue + timings.staging + timings.compute + timings.encode
            device = (timings.staging + timings.compute) / result.batch_size
            with self._lock:
                self.replies.append(Reply(operation, sent_at, at, tokens, result.batch_size, device, phases))

        future.add_done_callback(note)
        return future

    def flow(self, go_on: Callable[[], bool]) -> list[tuple[float, float]]:
        """Bursts of attentions of two sizes, layer applications and a decoder's step, with pauses between them.

        Returns the start and end of each burst.
        """
        small, large = arrays(4, 16, 32), arrays(4, 128, 32)
        x = arrays(24, WIDTH)[0]
        bursts = []
        with self.client.create_cache(num_kv_heads=4, head_dim=32) as cache:
            cache.append(small[1], small[2])
            step = [array[:, :1] for array in small]
            for number in itertools.count():
                begin = time.time()
                if number % TRUNCATE_EVERY == 0:
                    cache.truncate(16)
                calls = [self.send("attend_stream", 16, lambda: self.client.submit(*small)) for _ in range(BURST // 2)]
                calls += [self.send("attend_stream", 128, lambda: self.client.submit(*large)) for _ in range(2)]
                calls.append(self.send("apply_stream", 24, lambda: self.client.submit_apply(LAYER, x)))
                calls.append(
                    self.send("attend_stream", 1, lambda: self.client.submit(*step, caches=cache, causal=True))
                )
                for call in calls:
                    call.result()
                bursts.append((begin, time.time()))
                if not go_on():
                    return bursts
                time.sleep(_PAUSE_S)  # as if callers used their results; the idle device shows in its utilisation
        raise AssertionError("unreachable")

    def crowd(self, seen: Callable[[], bool]) -> tuple[int, int]:
        """Keeps requests queued until the queue has been seen: a few slow ones, which go first, and many others.

        Returns how many waited at least, and how many were in flight at most.
        """
        # In float64, which no fast kernel computes.
        long, small = [array.astype(np.float64) for array in arrays(8, 1024, 64)], arrays(4, 16, 32)
        while True:
            first = [self.client.submit(*long, softcap=1.0, priority=8) for _ in range(4)]
            others = [self.client.submit(*small, priority=-8) for _ in range(20)]
            while not all(call.done() for call in first):
                if seen():
                    for call in (*first, *others):
                        call.result()
                    return len(others), len(first) + len(others)
                time.sleep(0.02)
            for call in others:
                call.result()


def fill(cache: Cache, tokens: int) -> None:
    """Appends `tokens` tokens to a cache with 4 heads of 32."""
    _, key, value = arrays(4, tokens, 32)
    cache.append(key, value)
