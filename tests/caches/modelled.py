"""A trivial model of caches: lists of tokens, a table that obeys placements, and a clock. The holders of each page are
counted anew each time; what waiting operations will take is found by simulating them, a token at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.changes import Grow
from attnserve_server.caches.layer import Placement
from attnserve_server.caches.reservation import Reservation
from attnserve_server.caches.shape import CacheShape

LAYERS = 2
SHAPE = CacheShape(num_kv_heads=1, head_dim=8, value_dim=8, layers=LAYERS, dtype="float32")
PAGE_TOKENS = 4
PAGE_BYTES = 256
PAGES = 14
NOBODYS = -1
"""The contents of free memory."""


@dataclass(eq=False)
class Model:
    """The expected state of a cache."""

    cache: Cache
    tokens: list[list[int]]
    ttl: float | None
    expires: float
    waiting: list[Operation] = field(default_factory=list)
    users: int = 0
    deleted: bool = False
    alias: str = ""


@dataclass(eq=False)
class Operation:
    """An operation that waits for its turn on its caches, has it, or is over and about to leave."""

    models: list[Model]
    reservation: Reservation[Any]
    wanted: list[tuple[Model, int, list[int]]] = field(default_factory=list)
    """What is appended to which layer."""
    foreseen: bool = True
    """Whether operations behind it count on its happening."""
    fork_ttl: float | None = None
    forked: list[Model] = field(default_factory=list)
    """The caches that are forked, each as often as it is."""
    truncate_to: list[int] = field(default_factory=list)
    """The length that each cache is cut off at."""
    placements: list[Placement] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    state: str = "waiting"
    surprised: bool = False
    """Whether it may take more than foreseen: an operation before it did not happen, in a queue of not only appends."""


class World:
    """All caches that should exist, all operations in flight, and the memory."""

    def __init__(self) -> None:
        self.memory = [[NOBODYS] * PAGE_TOKENS for _ in range(PAGES)]
        self.models: list[Model] = []
        self.operations: list[Operation] = []
        self.now = 0.0

    def present(self) -> list[Model]:
        return [model for model in self.models if not model.deleted]

    def expired(self) -> list[Model]:
        return [model for model in self.present() if not model.users and model.expires <= self.now]

    def forget(self) -> None:
        """Drops the models of caches that are deleted and not in use."""
        self.models = [model for model in self.models if model.users or not model.deleted]

    def renew(self, model: Model) -> None:
        model.expires = inf if model.ttl is None else self.now + model.ttl

    def holders(self) -> Counter[int]:
        """How many hold each page: layers, and operations that may still be copying it."""
        held = Counter(page for model in self.models for layer in range(LAYERS) for page in model.cache.pages(layer))
        for operation in self.operations:
            changes = operation.reservation.changes if operation.reservation.is_open else []
            held.update(c.copied for _, c in changes if isinstance(c, Grow) and c.copied is not None)
        return held

    def shared_bytes(self, model: Model) -> int:
        """The bytes of a cache's pages that others hold too."""
        held = self.holders()
        return sum(held[page] > 1 for layer in range(LAYERS) for page in model.cache.pages(layer)) * PAGE_BYTES

    def waiting(self, model: Model) -> list[Operation]:
        return [operation for operation in model.waiting if operation.state == "waiting"]

    def pages_to_come(self, model: Model, layer: int, line: Sequence[Operation]) -> int:
        """The most free pages that queued operations take for a layer, if each does what it announced."""
        holders, pages, length = self.holders(), list(model.cache.pages(layer)), len(model.tokens[layer])
        taken = most = 0

        def let_go(page: int) -> None:
            nonlocal taken
            holders[page] -= 1
            taken -= not holders[page]

        def take() -> None:
            nonlocal taken, most
            pages.append(1000 + holders.total())
            holders[pages[-1]] += 1
            taken += 1
            most = max(most, taken)

        for operation in line:
            if operation.wanted:
                [new] = [new for other, index, new in operation.wanted if (other, index) == (model, layer)] or [[]]
                for _ in new:
                    if length % PAGE_TOKENS == 0:
                        take()
                    elif holders[pages[-1]] > 1:
                        let_go(pages.pop())
                        take()
                    length += 1
            elif operation.forked:
                holders.update(pages * operation.forked.count(model))
            else:
                length = min(length, operation.truncate_to[operation.models.index(model)])
                while len(pages) * PAGE_TOKENS >= length + PAGE_TOKENS:
                    let_go(pages.pop())
        return most

    def surprise(self, model: Model, by: Operation) -> None:
        """An operation on a cache does not happen, though those waiting behind it count on it."""
        waiting = self.waiting(model)
        if not all(operation.wanted for operation in [by, *waiting]):
            for operation in waiting:
                operation.surprised = True
