"""Where queries, keys and values of requests lie in host memory, from which devices take them.

In: requests that share a problem, and memory. Out: their payloads in it, end to end, and views of these. Inputs that
are computed before anything else is staged reuse the place of the last such inputs: most of the cost of staging a small
request is getting memory and laying out views.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import torch

from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request

Allocate = Callable[[int], torch.Tensor]

LOOKED_AT: Final = 4 << 20
"""Staging checks inputs of up to this many bytes for finiteness, all at once; kernels check larger ones, on threads."""
KEPT: Final = 1 << 20
"""Inputs of up to this many bytes go into memory that is kept."""
MOST_KEPT: Final = 64
"""How many layouts of that memory are remembered."""
COPIED_ASIDE: Final = 64 << 10
"""Payloads of this many bytes or more are copied without the GIL."""

Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""


def fill(raw: torch.Tensor, payloads: Sequence[memoryview]) -> None:
    """Copies payloads to host memory of as many bytes, end to end."""
    target, start = memoryview(raw.numpy()), 0  # type: ignore[arg-type]
    for payload in payloads:
        start = copy(payload, target, start)


def copy(payload: memoryview, target: memoryview, start: int) -> int:
    """Copies a payload there, a large one without the GIL: other threads go on receiving and launching meanwhile.
    Returns where it ends.
    """
    stop = start + len(payload)
    if len(payload) < COPIED_ASIDE:
        target[start:stop] = payload
    else:
        np.frombuffer(target[start:stop], np.uint8)[:] = np.frombuffer(payload, np.uint8)
    return stop


class Place:
    """Host memory for the queries, keys and values of `count` requests that share a problem."""

    __slots__ = ("_array", "_bytes", "_parts", "_views", "elements", "inputs", "problem", "whole")

    def __init__(self, problem: Problem, dtype: torch.dtype, count: int, allocate: Allocate) -> None:
        specs = [problem.tensors[name] for name in ("query", "key", "value")]
        parts, views, end, used = [], [], 0, 0
        for spec in specs:
            size = spec.size
            if size:
                parts.append((spec.payload, end))
            views.append((*arranged(spec.shape, problem.length_first, count), end // dtype.itemsize))
            used += size * count
            end += -(-size * count // CACHE_LINE) * CACHE_LINE
        raw = allocate(end)
        self.problem = problem
        self._bytes = memoryview(raw.numpy())  # type: ignore[arg-type]
        self._parts, self._views = parts, views
        self.elements = raw.view(dtype)
        self.inputs = self.inputs_in(self.elements)
        """Views of the elements [N, H, L, D], in the layout of the payloads."""
        self.whole = used == end <= LOOKED_AT
        """Whether all elements belong to inputs, and are few enough for staging to check."""

    def fill(self, members: Sequence[Request]) -> None:
        """Copies the payloads of requests there, end to end."""
        for payload, start in self._parts:
            for member in members:
                start = copy(member.payloads[payload], self._bytes, start)

    def inputs_in(self, elements: torch.Tensor) -> Inputs:
        """The same views of other elements, such as the uploaded ones."""
        query, key, value = (elements.as_strided(*view) for view in self._views)
        return query, key, value


class KeptPlace(threading.local):
    """Memory that each thread uses again and again, and recent layouts of inputs in it."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._places: dict[tuple[int, int], Place] = {}

    def place(self, problem: Problem, dtype: torch.dtype, count: int, allocate: Allocate) -> Place:
        """Where inputs go, valid until it is next called."""
        found = self._places.get((id(problem), count))
        if found is not None:  # it keeps its problem alive, so no other can have this id
            return found
        place = Place(problem, dtype, count, lambda size: self._part(size) if size <= KEPT else allocate(size))
        if place.elements.nbytes <= KEPT:
            if len(self._places) >= MOST_KEPT:
                self._places.clear()
            self._places[id(problem), count] = place
        return place

    def _part(self, size: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(KEPT, dtype=torch.uint8)
        return self._memory[:size]


@lru_cache(maxsize=4096)
def arranged(
    shape: tuple[int, ...], length_first: bool, count: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Axes [N, H, L, D] of packed tensors that lie end to end, and their strides in elements."""
    batch = count * shape[0] if len(shape) == 4 else count
    heads, length, width = (1, *shape) if len(shape) == 2 else shape[-3:]
    if not length_first or len(shape) == 2:
        return (batch, heads, length, width), (heads * length * width, length * width, width, 1)
    length, heads = heads, length
    return (batch, heads, length, width), (length * heads * width, width, heads * width, 1)
