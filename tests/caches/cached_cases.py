"""Server caches that hold the keys and values of a case, and a caller of that server."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from caller import Caller
from cases import Case
from conftest import Server
from oracle import Array

STORAGES = ("bfloat16", "float16", "float32")


@pytest.fixture(scope="module")
def caller(paged_server: Server) -> Iterator[Caller]:
    """A caller of a server whose caches have many pages."""
    with grpc.insecure_channel(paged_server.address) as channel:
        yield Caller(channel)


def by_sequence(case: Case) -> tuple[Array, Array]:
    """The keys and values of a case as [B, Hk, S, D], whatever its layout and rank."""
    key, value = case.key, case.value
    if case.options.get("layout") == "length_first" and key.ndim > 2:
        key, value = key.swapaxes(-3, -2), value.swapaxes(-3, -2)
    lacking = (None,) * (4 - key.ndim)
    return key[lacking], value[lacking]


def in_layout(case: Case, array: Array) -> Array:
    """[B, Hk, T, D] in the layout and rank of the case's keys."""
    if case.options.get("layout") == "length_first" and case.key.ndim > 2:
        array = array.swapaxes(1, 2)
    return array[(0,) * (4 - case.key.ndim)]


def fill(
    caller: Caller, case: Case, storage: str, lengths: list[int], chunks: list[int], left_out: int = 0
) -> list[str]:
    """A cache for each sequence of a case, with all its tokens but the last `left_out`, appended in chunks."""
    key, value = by_sequence(case)
    names = []
    for b, length in enumerate(lengths):
        name = caller.create(key.shape[1], key.shape[3], value_dim=value.shape[3], dtype=storage)
        start, place = 0, 0
        while start < length - left_out:
            stop = min(start + chunks[place % len(chunks)], length - left_out)
            after = caller.append(name, key[b, :, start:stop], value[b, :, start:stop], expected_length=start)
            assert after == stop
            start, place = stop, place + 1
        names.append(name)
    return names


def last(case: Case, lengths: list[int], count: int) -> tuple[Array, Array]:
    """The last `count` tokens of each sequence, as a request appends them."""
    key, value = (
        np.stack([part[b, :, length - count : length] for b, length in enumerate(lengths)])
        for part in by_sequence(case)
    )
    return in_layout(case, key), in_layout(case, value)
