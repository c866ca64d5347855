"""What the SDK knows of a cache, and what its caller sees of that.

In: the description of a cache, from its server, and the turns of the client that uses it. Out: a `CacheState`, which
operations use and change in their turns (`plans`), and the `Handle` on it that callers have.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from typing import Final, NoReturn, TypeAlias

from attnserve._caching.turns import CacheLine, Turns
from attnserve._requests import cache_requests
from attnserve._requests.cache_requests import CacheInfo


class CacheState:
    """What the SDK knows of a cache."""

    __slots__ = ("home", "ids", "info", "line", "tokens", "turns", "writes")

    def __init__(self, info: CacheInfo, turns: Turns, home: str | None, opened: bool = False) -> None:
        self.info: Final = info
        """Its description when it was made or opened."""
        self.home: Final = home
        """The address of the server that is asked about it; None for wherever the client's address leads."""
        self.tokens: Final = list(info.lengths)
        """The tokens of each layer, as of the last operation that succeeded. Changed in a turn only."""
        self.ids: Final = itertools.count(secrets.randbits(63) + 1)
        """Ids by which the server recognises repeated appends and truncations; different from any other client's."""
        self.line: Final = CacheLine()
        """The operations that use or wait for the cache."""
        self.turns: Final = turns
        """The turns of its client."""
        self.writes = not opened
        """Whether this client made the cache, or has begun to change it. If not, another one appends to it, and it is
        read at whatever length it has.
        """


class Handle:
    """A caller's cache, without its operations. Nothing here asks the server."""

    def __init__(self, state: CacheState) -> None:
        self._state: Final = state

    @property
    def name(self) -> str:
        """Its name, which nobody can guess."""
        return self._state.info.name

    @property
    def num_kv_heads(self) -> int:
        """The heads of its keys and values."""
        return self._state.info.num_kv_heads

    @property
    def head_dim(self) -> int:
        """The width of each key head."""
        return self._state.info.head_dim

    @property
    def value_dim(self) -> int:
        """The width of each value head."""
        return self._state.info.value_dim

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self._state.info.layers

    @property
    def dtype(self) -> str:
        """The stored dtype, such as ``float32``."""
        return self._state.info.dtype

    @property
    def ttl(self) -> float | None:
        """How long it lives after its last use, in seconds; None: until it is deleted."""
        return self._state.info.ttl

    @property
    def alias(self) -> str | None:
        """The name that its caller gave it when it was created; None if it has none."""
        return self._state.info.alias

    @property
    def address(self) -> str | None:
        """Where the server that holds it can be reached, also for `Client.open_cache`; None if not known."""
        return self._state.info.address or self._state.home

    @property
    def length(self) -> int:
        """The number of tokens in layer 0, as of the last operation that succeeded."""
        return self._state.tokens[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each layer, as of the last operation that succeeded."""
        return tuple(self._state.tokens)

    def __repr__(self) -> str:
        """Its shape and known length, without asking the server; its name only in part."""
        sizes = ("num_kv_heads", "head_dim", "value_dim", "layers", "dtype", "length", "address")
        described = ", ".join(f"{size}={getattr(self, size)!r}" for size in sizes)
        return f"{type(self).__name__}({cache_requests.shown_name(self.name)}, {described})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cache cannot be pickled: have it opened by its name, with open_cache")


Handles: TypeAlias = Handle | Iterable[Handle]
"""One cache or several."""
