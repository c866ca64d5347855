"""The sequences of a batch, each in a resident cache of its own. They are used together.

In: keys, values and queries of a whole batch. Out: calls of a `Client`; all caches are on one server, so that one call
attends to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from attnserve import AttentionResult
from attnserve._caching.groups import portions

if TYPE_CHECKING:
    from attnserve import Cache, Client


class Sequences:
    """The resident caches of a batch; none before `create` and after `delete`. Methods raise `AttnServeError`."""

    def __init__(self, client: Client, layers: int, ttl: float | None) -> None:
        self._client = client
        self._layers = layers
        self._ttl = ttl
        self._caches: list[Cache] = []
        self._unwanted: list[Cache] = []
        """What is still to be deleted."""
        self._in_doubt = False
        """Whether a call has failed that may have appended something all the same."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._caches)

    def create(self, batch: int, num_kv_heads: int, head_dim: int, value_dim: int, dtype: Any) -> None:
        """Makes empty caches for a batch: all of them, or none. RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this cache is closed")
        with ExitStack() as undo:
            first = self._client.create_cache(
                num_kv_heads, head_dim, value_dim=value_dim, layers=self._layers, dtype=dtype, ttl=self._ttl
            )
            undo.callback(first.delete)
            others = self._forks([first] * (batch - 1))  # which are on the same server
            undo.pop_all()
        self._caches, self._in_doubt = [first, *others], False

    @property
    def shape(self) -> tuple[int, int, int]:
        """The heads of keys and values, and the widths of a key and a value; only while there are caches."""
        first = self._caches[0]
        return first.num_kv_heads, first.head_dim, first.value_dim

    def length(self, layer: int) -> int:
        """How many tokens a layer has, the same for all sequences."""
        return self._caches[0].lengths[layer] if self._caches else 0

    def append(self, layer: int, keys: Iterable[Any], values: Iterable[Any]) -> None:
        """Appends keys `[B, Hk, T, D]` and values `[B, Hk, T, Dv]` to a layer."""
        with self._doubted():
            for cache, key, value in zip(self._caches, keys, values, strict=True):
                cache.append(key, value, layer=layer)

    def attend(self, layer: int, *arrays: Any, **options: Any) -> AttentionResult[Any]:
        """`Client.attend` to a layer: queries `[B, Hq, Lq, D]`, and perhaps keys and values to append."""
        with self._doubted():
            return self._client.attend(*arrays, caches=self._caches, cache_layer=layer, **options)

    @contextmanager
    def _doubted(self) -> Iterator[None]:
        """Around calls that may have appended something even if they fail, or are interrupted."""
        try:
            yield
        except BaseException:
            self._in_doubt = True
            raise

    def truncate(self, length: int) -> None:
        """Cuts all layers off at a length, whatever failed before; those that are shorter stay as they are."""
        for cache in self._caches if self._in_doubt else ():
            cache.refresh()
        longer = [cache for cache in self._caches if max(cache.lengths) > length]
        with self._doubted():
            for some in portions(longer, self._layers):
                self._client.caches.truncate(some, length)
        self._in_doubt = False

    def select(self, indices: Sequence[int]) -> None:
        """Sequence i becomes what sequence `indices[i]` was. One that is named again is forked, one that is not named
        is deleted.
        """
        chosen = [self._caches[index] for index in indices]
        again = [place for place, index in enumerate(indices) if index in indices[:place]]
        for place, fork in zip(again, self._forks([chosen[place] for place in again]), strict=True):
            chosen[place] = fork
        self._unwanted += [cache for cache in self._caches if cache not in chosen]
        self._caches = chosen
        self._delete_unwanted()

    def fork(self) -> Sequences:
        """Others with the same content, which is shared; what either appends is its own."""
        fork = Sequences(self._client, self._layers, self._ttl)
        fork._caches = self._forks(self._caches)
        return fork

    def _forks(self, caches: Sequence[Cache]) -> list[Cache]:
        """Forks of caches, all or none."""
        forks: list[Cache] = []
        with ExitStack() as undo:
            for some in portions(caches, self._layers):
                made = self._client.caches.fork(some)
                undo.callback(self._client.caches.delete, made)
                forks += made
            undo.pop_all()
        return forks

    def delete(self) -> None:
        """Deletes all of them. If that fails, they are tried again the next time."""
        self._unwanted += self._caches
        self._caches = []
        self._delete_unwanted()

    def close(self) -> None:
        """Forbids to make more."""
        self._closed = True

    def _delete_unwanted(self) -> None:
        self._client.caches.delete(self._unwanted)
        self._unwanted.clear()
