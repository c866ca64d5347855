"""Operations on caches, as the engine runs them: each at its turn, and each appends all of its tokens or none.

From admission on, a request holds its caches, so that none is evicted, and is promised the pages that its append needs.
So once it is admitted, it does not fail for lack of room that could have been foreseen. Lengths are compared with what
the caller expects only at its turn, because earlier operations may change them. Until then, pages and costs are counted
by the length that earlier operations will leave if they succeed; at its turn, by the actual length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.expiry import Expiry
from attnserve_server.caches.layer import Placement
from attnserve_server.caches.reservation import Reservation
from attnserve_server.caches.store import CacheStore
from attnserve_server.errors import FailedPrecondition, InvalidRequest, RequestError
from attnserve_server.requests.work import Work

if TYPE_CHECKING:
    from attnserve_server.caches.pages import PagePool


@dataclass(slots=True, eq=False)
class CacheHost:
    """The caches of one server: `store` decides, `pages` holds the bytes."""

    store: CacheStore
    pages: PagePool
    address: str
    """The address of this particular server; empty where it is not configured."""
    expiry: Expiry = field(init=False)

    def __post_init__(self) -> None:
        self.expiry = Expiry(self.store)


class Use(NamedTuple):
    """A layer of a cache that an operation reads, and appends `tokens` tokens to."""

    cache: Cache
    layer: int
    tokens: int
    expected_length: int | None
    append_id: int = 0
    """The id by which a resend of the append is recognised; 0 if it has none."""

    def coming_length(self) -> int:
        """The tokens that the layer will have after the operations before this one, or those that the caller expects,
        if these are fewer. If the layer has more than the caller expects, the request was resent or comes too late, and
        will not run.
        """
        coming = self.cache.coming_length(self.layer)
        return coming if self.expected_length is None else min(coming, self.expected_length)

    def expects(self, length: int) -> bool:
        """Whether the caller expects this length, or states none."""
        return self.expected_length is None or self.expected_length == length

    def unexpected(self, length: int, what: str = "the cache") -> FailedPrecondition:
        """The error of an operation that expects another length. It says so if this very append was carried out before.
        `what` is what the message calls the cache. That is not its name: messages are logged, and a name may be a
        secret.
        """
        found = {"name": self.cache.name, "length": str(length)}
        if self.tokens and self.append_id and self.cache.has_append(self.layer, self.append_id):
            found["appended"] = "true"
            message = f"{what} has {length} tokens, for this append was carried out before; nothing was changed"
        else:
            message = f"{what} has {length} tokens, not {self.expected_length}; nothing was changed"
        return FailedPrecondition(message, "UNEXPECTED_LENGTH", **found)


@dataclass(slots=True, eq=False)
class CacheWork(Work):
    """What operations on caches have in common. `lengths` are those after the appends, `placements` where to write."""

    list_field: ClassVar[str] = "caches"
    """The field of the request that lists the caches, if lengths of several may be expected."""

    host: CacheHost
    uses: tuple[Use, ...]
    received_bytes: int
    needs: Sequence[Hashable] = field(init=False)
    lengths: list[int] = field(default_factory=list, init=False)
    placements: Sequence[Placement] = field(default=(), init=False)
    _before: list[int] = field(default_factory=list, init=False)
    _reservation: Reservation[Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Lists the names of the caches, each once, however many of its layers are used."""
        uses = self.uses
        self.needs = [uses[0].cache.name] if len(uses) == 1 else list(dict.fromkeys(use.cache.name for use in uses))

    @property
    def shares(self) -> bool:
        """Whether it leaves its caches as they are."""
        return False

    @property
    def appended_field(self) -> str:
        """The field of the request whose tokens it appends."""
        return "key"

    def enter(self) -> None:
        """Holds the caches and lines up to change them. Raises CacheFull."""
        store, now = self.host.store, monotonic()
        self.line_up(now)
        for held, use in enumerate(self.uses):
            try:
                store.hold(use.cache, now)
            except RequestError:  # the cache was evicted to make room
                for other in self.uses[:held]:
                    store.release(other.cache, now)
                self.leave_line()
                raise

    def line_up(self, now: float) -> None:
        """Reserves what it appends."""
        appends = [(use.cache, use.layer, use.tokens) for use in self.uses if use.tokens]
        if appends:
            foreseen = all(use.expects(use.cache.coming_length(use.layer)) for use in self.uses)
            self._reservation = self.host.store.reserve(appends, now, foreseen, self.appended_field)

    def leave_line(self) -> None:
        """Ends its reservation: it has been carried out, or never will be."""
        if self._reservation is not None:
            self.host.store.cancel(self._reservation)

    def begin(self) -> None:
        """Places the appends. Raises FailedPrecondition if a cache does not have the expected length, CacheFull if
        there is less room than could be foreseen, and what `count` and `fit` raise.
        """
        self._before = [use.cache.length(use.layer) for use in self.uses]
        lengths = []
        for use, before in zip(self.uses, self._before, strict=True):
            if not use.expects(before):
                raise use.unexpected(before, self.spoken_of(use.cache))
            lengths.append(before + use.tokens)
        self.fit(max(lengths, default=0))
        self.count(lengths)
        if self._reservation is not None:
            append_ids = [use.append_id for use in self.uses if use.tokens]
            self.placements = self.host.store.place(self._reservation, monotonic(), append_ids)
        self.lengths = lengths

    def spoken_of(self, cache: Cache) -> str:
        """What its errors call a cache: by its place in the request, if that has several."""
        return "the cache" if len(self.needs) == 1 else f"{self.list_field}[{self.needs.index(cache.name)}]"

    def count(self, lengths: list[int]) -> None:
        """Counts what it costs with layers of these lengths, its own tokens included. Raises InvalidRequest if that is
        more than a request may cost.
        """

    def fit(self, longest: int) -> None:
        """Fits the request to its caches, the longest of which has `longest` tokens after the appends: sets what
        depends on their lengths. Raises InvalidRequest or FailedPrecondition.
        """

    def end(self, failed: bool) -> None:
        """Undoes the appends if it failed."""
        if failed and self._reservation is not None:
            self.host.store.undo(self._reservation)

    def leave(self) -> None:
        """Lets go of everything."""
        self.leave_line()
        now = monotonic()
        for use in self.uses:
            self.host.store.release(use.cache, now)


def cache_named(host: CacheHost, name: str, owner: str | None, field: str = "name") -> Cache:
    """The cache that a request names, in `field`. Raises InvalidRequest if the name is empty, and NotFound."""
    if not name:
        raise InvalidRequest(field, "the name of a cache", "nothing")
    return host.store.get(name, monotonic(), owner)


def check_named(names: Sequence[str]) -> None:
    """Raises InvalidRequest if a reference to a cache has no name."""
    if "" in names:
        raise InvalidRequest(f"caches[{names.index('')}].name", "the name of a cache", "nothing")


def check_distinct(uses: Sequence[Use], field: str = "caches") -> None:
    """Raises InvalidRequest if a cache is used twice. `field` is the one that names them."""
    seen: set[str] = set()
    for index, use in enumerate(uses):
        if use.cache.name in seen:
            raise InvalidRequest(f"{field}[{index}].name", "a cache that is not among the others", "one that is")
        seen.add(use.cache.name)
