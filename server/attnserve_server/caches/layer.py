"""One layer of a cache: how many tokens it has and which pages they are in. No memory is touched here.

A layer with n tokens has ceil(n / P) pages, all full but the last: its layout depends on n alone, and not on how the
tokens arrived. So answers do not depend on that either. A fork takes the same time however many pages there are: both
layers have the same list of pages, and whichever changes first then gets a list of its own. An append to a last page
that is shared continues in a copy of it; full pages are never written again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from attnserve_server.caches.changes import Change, Foreseen, Grow, foresee
from attnserve_server.caches.pool import PageAllocator

if TYPE_CHECKING:
    from attnserve_server.caches.page_memory import PageAddresses

MOST_APPENDS: Final = 16
"""How many appends a layer remembers."""
_APPEND: Final = Struct("=QQ")
"""The id of an append, and the length after it."""


class Write(NamedTuple):
    """Tokens that go into a page, in the order in which they were given."""

    page: int
    first_slot: int
    tokens: int


class Placement(NamedTuple):
    """Where appended tokens go: first whole pages are copied, (source, destination), then tokens are written."""

    copies: list[tuple[int, int]]
    writes: list[Write]


class PageTable:
    """An immutable snapshot of a layer's pages. Steps meet the same one again and again: its memory addresses are
    computed once.
    """

    __slots__ = ("addresses", "numbers")

    def __init__(self, numbers: array[int]) -> None:
        """These pages, in the order of the tokens."""
        self.numbers = numbers
        self.addresses: PageAddresses | None = None
        """Cached here by the pool."""


class _PageList:
    """Pages in the order of their tokens. To the allocator, a list is one holder of each of its pages, however many
    layers have the list.
    """

    __slots__ = ("layers", "numbers", "table")

    def __init__(self, numbers: array[int], layers: float = 1) -> None:
        self.numbers = numbers
        self.layers = layers
        """How many layers have it. While there are several, it does not change."""
        self.table: PageTable | None = None


_NO_PAGES: Final = _PageList(array("i"), inf)
"""The list of all layers that have none: these take little memory."""
_NO_CHANGES: Final[list[Change]] = []
"""The line of all layers for which no change waits, likewise."""


class CacheLayer:
    """The tokens and pages of one layer."""

    __slots__ = (
        "_allocator", "_line", "_list", "_others", "_to_append", "_tokens_per_page", "appends", "length", "promised",
    )  # fmt: skip

    def __init__(self, allocator: PageAllocator, tokens_per_page: int) -> None:
        """An empty layer."""
        self._allocator = allocator
        self._tokens_per_page = tokens_per_page
        self._list = _NO_PAGES  # of C's int, which is the allocator's int32: NumPy reads lists in place
        self.length = 0
        self.appends = b""
        """The last appends that have ids and whose tokens are all still there, packed: bytes are small, and easily
        restored.
        """
        self.promised = 0
        """Free pages promised to the changes that wait."""
        # The changes that wait; the tokens that the appends among them have, and how many are no appends.
        self._line = _NO_CHANGES
        self._to_append = 0
        self._others = 0

    def __len__(self) -> int:
        """How many pages it has."""
        return len(self._list.numbers)

    @property
    def pages(self) -> array[int]:
        """Its pages, in the order of its tokens: a copy, the caller's to keep."""
        return self._list.numbers[:]

    @property
    def table(self) -> PageTable:
        """Its pages as a table, which is reused until they change."""
        if self._list.table is None:
            self._list.table = PageTable(self._list.numbers[:])
        return self._list.table

    @property
    def shared(self) -> int:
        """How many of its pages others hold too; they are the first ones."""
        return shared_pages([self])

    def pages_for(self, tokens: int) -> int:
        """How many free pages an append of so many tokens takes now."""
        if not tokens:
            return 0
        return self.pages_of(self.length + tokens) - len(self) + self._tail_is_shared()

    def wait(self, change: Change, first: bool = False) -> None:
        """Queues a change, behind all others or before them."""
        if not self._line:
            self._line = [change]  # short: a deque allocates room for many from the start
        elif first:
            self._line.insert(0, change)
        else:
            self._line.append(change)
        self._count(change, 1)

    def wait_no_more(self, change: Change) -> None:
        """Takes a change out of the queue: its turn has come, or never will."""
        self._line.remove(change)
        if not self._line:
            self._line = _NO_CHANGES
        self._count(change, -1)

    @property
    def is_waited_for(self) -> bool:
        """Whether any change waits."""
        return bool(self._line)

    def is_first(self, change: Change) -> bool:
        """Whether it is the turn of a waiting change."""
        return self._line[0] is change

    def _count(self, change: Change, times: int) -> None:
        if isinstance(change, Grow):
            self._to_append += times * change.tokens
        else:
            self._others += times

    @property
    def coming_length(self) -> int:
        """The tokens that it will have after all waiting changes, if each succeeds."""
        return self._foreseen().length if self._others else self.length + self._to_append

    @property
    def coming_pages(self) -> int:
        """The most free pages that the waiting changes take together, at any time, if each succeeds.

        Where all of them are appends, they take no more if some fail.
        """
        if not self._to_append:
            return 0
        return self._foreseen().pages if self._others else self.pages_for(self._to_append)

    def _foreseen(self) -> Foreseen:
        return foresee(self._line, self.length, self.shared, self._tokens_per_page)

    def append(self, tokens: int, append_id: int) -> tuple[Placement, int | None]:
        """Takes room for tokens out of the promised pages, for the append with that id.

        Returns where they go, and the shared page that has to be copied, if there is one. The layer's hold on that page
        passes to the caller, who keeps it until the copy has been made and can no longer be undone.
        """
        if not tokens:
            return Placement([], []), None
        per_page, start, end = self._tokens_per_page, self.length, self.length + tokens
        numbers, copied = self._list.numbers, None
        if self.pages_for(tokens):
            numbers = self._to_change()
            if self._tail_is_shared():
                copied = numbers.pop()
            behind = numbers[-1] if numbers else None
            pages = self._allocator.allocate(self.pages_of(end) - len(numbers), behind)
            self.promised -= len(pages)
            numbers.extend(pages)
        self.length = end
        if append_id:
            self.appends = self.appends[-(MOST_APPENDS - 1) * _APPEND.size :] + _APPEND.pack(append_id, end)
        first = start // per_page
        writes = []
        for index in range(first, len(numbers)):
            slot = max(start - index * per_page, 0)
            writes.append(Write(numbers[index], slot, min(end - index * per_page, per_page) - slot))
        return Placement([] if copied is None else [(copied, numbers[first])], writes), copied

    def has_append(self, append_id: int) -> bool:
        """Whether one of the last appends has this id, and all its tokens are still there."""
        return any(append_id == known for known, _ in _APPEND.iter_unpack(self.appends))

    def restore(self, length: int, copied: int | None, appends: bytes) -> None:
        """Undoes appends, back to `length` tokens and the `appends` of then; `copied` is the page that was copied, if
        any, which the layer holds again.
        """
        cut([self], length)
        self.appends = appends
        if copied is not None:
            numbers = self._to_change()
            self._allocator.release(numbers[-1:])
            numbers[-1] = copied

    def drop(self, length: int) -> tuple[array[int], array[int]]:
        """Drops everything behind the first `length` tokens; it must have that many. Returns the pages of which it has
        become another holder, and those that it holds no more: the caller tells the allocator (`cut`).
        """
        pages = self.pages_of(length)
        shared = dropped = _NO_PAGES.numbers
        if pages < len(self):
            numbers = self._list.numbers
            if self._list.layers > 1:
                self._leave()
                shared = numbers[:pages]
                self._list = _PageList(shared[:])
            else:
                dropped = numbers[pages:]
                del numbers[pages:]
                self._list.table = None
        self.length = length
        if self.appends:
            kept = [_APPEND.pack(known, end) for known, end in _APPEND.iter_unpack(self.appends) if end <= length]
            self.appends = b"".join(kept)
        return shared, dropped

    def fork(self) -> CacheLayer:
        """Another layer with the same tokens in the same pages."""
        layer = CacheLayer(self._allocator, self._tokens_per_page)
        layer._list, layer.length = self._list, self.length
        self._list.layers += 1
        self._allocator.hold_again(len(self))
        return layer

    def pages_of(self, tokens: int) -> int:
        """How many pages so many tokens fill, in a layer that has no others."""
        return -(-tokens // self._tokens_per_page)

    def _to_change(self) -> array[int]:
        """Its pages, which are about to change: in a list of its own from now on, if other layers have the same."""
        if self._list.layers > 1:
            self._leave()
            self._list = _PageList(self.pages)
            self._allocator.share(self._list.numbers)
        self._list.table = None
        return self._list.numbers

    def _leave(self) -> None:
        """Leaves its list of pages to the other layers that have it."""
        self._list.layers -= 1
        self._allocator.hold_again(-len(self))

    def _tail_is_shared(self) -> bool:
        if not self.length % self._tokens_per_page:
            return False
        return self._list.layers > 1 or self._allocator.is_shared(self._list.numbers[-1])


def pages_in(layers: Iterable[CacheLayer]) -> int:
    """How many pages layers have together; what they share counts for each."""
    return sum(map(len, layers))


def cut(layers: Sequence[CacheLayer], length: int) -> None:
    """Drops what the layers of a cache have behind the first `length` tokens, and releases all their pages together:
    one layer after the other takes several times as long.
    """
    shared, dropped = array("i"), array("i")
    for layer in layers:
        if layer.length > length:
            more_shared, more_dropped = layer.drop(length)
            shared += more_shared
            dropped += more_dropped
    if shared:
        layers[0]._allocator.share(shared)
    layers[0]._allocator.release(dropped)


def clear(layers: Sequence[CacheLayer]) -> None:
    """Empties the layers of a cache, and releases all their pages together: one layer after the other takes some ten
    times as long.
    """
    pages = array("i")
    for layer in layers:
        if layer._list.layers > 1:
            layer._leave()
        else:
            pages += layer._list.numbers
        layer._list = _NO_PAGES
        layer.length, layer.appends = 0, b""
    layers[0]._allocator.release(pages)


def shared_pages(layers: Sequence[CacheLayer]) -> int:
    """How many of the pages of a cache's layers others hold too. They are counted together: one layer after the other
    takes twenty times as long or more.
    """
    pages, shared = array("i"), 0
    for layer in layers:
        if layer._list.layers > 1:
            shared += len(layer)
        else:
            pages += layer._list.numbers
    return shared + layers[0]._allocator.shared(pages)
