"""The store against a trivial model, as a state machine: caches are lists of tokens, and the memory is a table that
obeys placements.

Operations arrive, wait for their turn on each of their caches, and begin; the memory is written later, in any order, as
by a device; some are cancelled or fail. Free memory is overwritten all the time, as by its next owner. So a page that
is freed too soon, or shared too long, shows as tokens that nobody appended.
"""

from __future__ import annotations

from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from modelled import LAYERS, NOBODYS, PAGE_BYTES, PAGE_TOKENS, PAGES, SHAPE, Model, Operation, World
from stores import extents_of, store_of

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.reservation import Reservation
from attnserve_server.caches.store import Truncation
from attnserve_server.errors import InvalidRequest, NotFound, Overloaded

MAX_CACHES = 5
INDEX = st.integers(0, 99)
TOKENS = [1, 5, 3, 2, 1, 6, 0, 11, 30]
UNTIL = st.sampled_from(["waiting", "begun", "over", "over"])
"""How far an operation gets in one step."""
NO_RESERVATION: Reservation[Any] = Reservation(set(), [], "")


class StoreMachine(World, RuleBasedStateMachine):
    """Operations in flight on a few caches in a small pool."""

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        World.__init__(self)
        self.store = store_of(PAGES, MAX_CACHES, page_bytes=PAGE_BYTES)
        self.token = count()

    # What happens

    @initialize(tokens=st.sampled_from([6, 4, 9]))
    def begins_with_a_cache(self, tokens: int) -> None:
        self.create(None)
        self.append(self.present(), [tokens] * LAYERS, "over")

    @rule(seconds=st.sampled_from([0.5, 4.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(ttl=st.sampled_from([None, 5.0, 20.0, None, 1.0]), alias=st.sampled_from(["", "", "one", "two"]))
    def is_created(self, ttl: float | None, alias: str) -> None:
        self.create(ttl, alias)

    def create(self, ttl: float | None, alias: str = "") -> None:
        [known] = [model for model in self.present() if alias and model.alias == alias] or [None]
        if known in self.expired():
            self.models.remove(known)  # it is evicted first, whatever else has expired
            known = None
        try:
            cache = self.store.create(SHAPE, ttl, self.now, alias=alias)
        except Overloaded:
            self.see_evictions()
            assert known is None
            assert len(self.present()) == MAX_CACHES
            assert not self.expired()
            return
        self.see_evictions()
        if known is None:
            self.add(cache, [[] for _ in range(LAYERS)], ttl, alias)
        else:
            assert cache is known.cache
            self.renew(known)

    @rule(
        which=INDEX,
        tokens=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=LAYERS),
        caches=st.sampled_from([1, 1, 2]),
        until=UNTIL,
        foreseen=st.sampled_from([True, True, True, False]),
    )
    @precondition(lambda self: self.present())
    def append_arrives(self, which: int, tokens: list[int], caches: int, until: str, foreseen: bool = True) -> None:
        present = self.present()
        chosen = [present[(which + index) % len(present)] for index in range(min(caches, len(present)))]
        if models := [model for model in chosen if self.found(model)]:
            self.append(models, tokens, until, foreseen)

    def append(self, models: list[Model], tokens: list[int], until: str, foreseen: bool = True) -> None:
        """Appends tokens to each layer of some caches."""
        wanted = [
            (model, layer, [next(self.token) for _ in range(new)])
            for model in models
            for layer, new in enumerate(tokens)
        ]
        appends = [(model.cache, layer, len(new)) for model, layer, new in wanted]
        try:
            operation = Operation(models, self.store.reserve(appends, self.now, foreseen), wanted, foreseen)
        except (CacheFull, InvalidRequest) as refusal:
            assert foreseen
            self.see_evictions(keep=models)
            self.see_refusal(refusal, Operation(models, NO_RESERVATION, wanted))
            return
        self.see_evictions(keep=models)
        self.arrive(operation, until="waiting")
        if foreseen:
            for model, layer, _ in wanted:
                assert model.cache.layers[layer].promised == self.pages_to_come(model, layer, self.foreseen(model))
        self.go_on(operation, until)

    @rule(which=st.lists(INDEX, min_size=1, max_size=3), ttl=st.sampled_from([None, 5.0]), until=UNTIL)
    @precondition(lambda self: self.present())
    def fork_arrives(self, which: list[int], ttl: float | None, until: str) -> None:
        if forked := self.found_among(which):
            models = list(dict.fromkeys(forked))
            reservation = self.store.wait_to_fork([model.cache for model in models])
            self.arrive(Operation(models, reservation, fork_ttl=ttl, forked=forked), until)

    @rule(
        which=st.lists(INDEX, min_size=1, max_size=2),
        share=st.floats(0, 1.1),
        until=UNTIL,
        foreseen=st.sampled_from([True, True, False]),
    )
    @precondition(lambda self: self.present())
    def truncate_arrives(self, which: list[int], share: float, until: str, foreseen: bool = True) -> None:
        if models := list(dict.fromkeys(self.found_among(which))):
            lengths = [int(share * max(map(len, model.tokens))) for model in models]
            truncations = [Truncation(model.cache, length, 0) for model, length in zip(models, lengths, strict=True)]
            reservation = self.store.wait_to_cut(truncations, foreseen)
            self.arrive(Operation(models, reservation, foreseen=foreseen, truncate_to=lengths), until)

    def found_among(self, which: list[int]) -> list[Model]:
        """Those of some caches that a request finds."""
        present = self.present()
        chosen = [present[index % len(present)] for index in which]
        found = [model for model in dict.fromkeys(chosen) if self.found(model)]
        return [model for model in chosen if model in found]

    @rule(which=INDEX, fails=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.operations)
    def goes_on(self, which: int, fails: bool) -> None:
        """An operation takes its next step, or is cancelled or fails instead."""
        operation = self.operations[which % len(self.operations)]
        match operation.state:
            case "waiting" if fails:
                self.come_to_nothing(operation)
            case "waiting" if self.has_turn(operation):
                self.begin(operation)
            case "begun" | "written" if fails:
                self.fail(operation)
            case "begun":
                self.write(operation)
            case "written":
                self.end_turn(operation)
            case "over":
                self.leave(operation)

    @rule()
    def everything_runs(self) -> None:
        for operation in list(self.operations):
            self.go_on(operation, "over")
            self.leave(operation)

    def go_on(self, operation: Operation, until: str) -> None:
        """Takes an operation as far as `until`, if nothing goes wrong and its turn has come."""
        if operation.state == "waiting" != until and self.has_turn(operation):
            self.begin(operation)
        if operation.state == "begun" != until:
            self.write(operation)
        if operation.state == "written" != until:
            self.end_turn(operation)

    def begin(self, operation: Operation) -> None:
        if operation.wanted:
            self.place(operation)
        elif operation.forked:
            self.fork(operation)
        else:
            self.truncate(operation)

    def place(self, operation: Operation) -> None:
        refusal: CacheFull | InvalidRequest | None = None
        try:
            operation.placements = list(self.store.place(operation.reservation, self.now))
        except (CacheFull, InvalidRequest) as error:
            refusal = error
        if refusal is not None:
            self.see_evictions(keep=operation.models)
            assert operation.surprised or not operation.foreseen, "what it needs was foreseen, and promised"
            self.come_to_nothing(operation)
            free = {"free_bytes": str(self.store.free_bytes)} if isinstance(refusal, CacheFull) else {}
            assert free.items() <= refusal.metadata.items()
            return
        self.see_evictions(keep=operation.models)
        operation.state = "begun"
        operation.before = [len(model.tokens[layer]) for model, layer, _ in operation.wanted]
        for model, layer, new in operation.wanted:
            model.tokens[layer].extend(new)

    def truncate(self, operation: Operation) -> None:
        cuts = list(zip(operation.models, operation.truncate_to, strict=True))
        truncations = [Truncation(model.cache, length, 0) for model, length in cuts]
        if any(length > max(map(len, model.tokens)) for model, length in cuts):
            with pytest.raises(InvalidRequest):
                self.store.truncate(truncations, operation.reservation)
            self.come_to_nothing(operation)
            return
        self.store.truncate(truncations, operation.reservation)
        for model, length in cuts:
            for tokens in model.tokens:
                del tokens[length:]
            if not operation.foreseen:
                self.surprise(model, operation)
        self.end_turn(operation)

    def fork(self, operation: Operation) -> None:
        caches, ttl = [model.cache for model in operation.forked], operation.fork_ttl
        try:  # also if a cache was deleted while the operation waited
            forks = self.store.fork(caches, [ttl] * len(caches), self.now, b"", operation.reservation)
        except Overloaded:
            self.see_evictions()
            assert len(self.present()) + len(caches) > MAX_CACHES
            assert not self.expired()
            self.come_to_nothing(operation)
        else:
            self.see_evictions()
            for model, fork in zip(operation.forked, forks, strict=True):
                self.add(fork, [list(tokens) for tokens in model.tokens], ttl)
            self.end_turn(operation)
        for model in operation.models:
            self.renew(model)

    def write(self, operation: Operation) -> None:
        operation.state = "written"
        for placement, (_, _, new) in zip(operation.placements, operation.wanted, strict=True):
            for source, target in placement.copies:
                self.memory[target][:] = self.memory[source]
            rest = list(new)
            for page, slot, tokens in placement.writes:
                self.memory[page][slot : slot + tokens] = rest[:tokens]
                del rest[:tokens]
            assert not rest

    def fail(self, operation: Operation) -> None:
        self.store.undo(operation.reservation)
        for (model, layer, _), before in zip(operation.wanted, operation.before, strict=True):
            del model.tokens[layer][before:]
        for model in operation.models:
            self.surprise(model, operation)
        self.end_turn(operation)

    def come_to_nothing(self, operation: Operation) -> None:
        """The operation has had no effect, and will have none."""
        self.store.cancel(operation.reservation)
        self.end_turn(operation)
        for model in operation.models:
            self.surprise(model, operation)

    def leave(self, operation: Operation) -> None:
        self.operations.remove(operation)
        self.store.cancel(operation.reservation)
        for model in operation.models:
            self.store.release(model.cache, self.now)
            model.users -= 1
            self.renew(model)
        self.forget()

    @rule(which=INDEX)
    @precondition(lambda self: len(self.present()) > 2)
    def is_deleted(self, which: int) -> None:
        model = self.present()[which % len(self.present())]
        self.store.delete(model.cache)
        model.deleted = True
        self.forget()

    @rule()
    def one_is_evicted(self) -> None:
        assert self.store.list(None, self.now) == [each.cache for each in self.present() if each not in self.expired()]
        expired = len(self.expired())
        assert self.store.expire(self.now) == bool(expired)
        self.see_evictions()
        assert len(self.expired()) == max(0, expired - 1)

    # What the model knows

    def has_turn(self, operation: Operation) -> bool:
        return all(model.waiting[0] is operation for model in operation.models)

    def found(self, model: Model) -> bool:
        """Whether a request finds the cache, as it must if and only if its lease has not ended."""
        if model in self.expired():
            with pytest.raises(NotFound):
                self.store.get(model.cache.name, self.now)
            self.models.remove(model)
            return False
        assert self.store.get(model.cache.name, self.now) is model.cache
        return True

    def add(self, cache: Cache, tokens: list[list[int]], ttl: float | None, alias: str = "") -> None:
        self.models.append(Model(cache, tokens, ttl, inf, alias=alias))
        self.renew(self.models[-1])

    def arrive(self, operation: Operation, until: str) -> None:
        self.operations.append(operation)
        for model in operation.models:
            self.store.hold(model.cache, self.now)
            model.users += 1
            model.waiting.append(operation)
            self.renew(model)
        self.go_on(operation, until)

    def end_turn(self, operation: Operation) -> None:
        operation.state = "over"
        for model in operation.models:
            model.waiting.remove(operation)

    def see_evictions(self, keep: list[Model] | None = None) -> None:
        """Caches that were evicted had expired, and none that stays expired earlier."""
        evicted = [model for model in self.present() if model.cache.gone]
        assert set(evicted) <= set(self.expired()) - set(keep or [])
        self.models = [model for model in self.models if model not in evicted]
        stays = [model.expires for model in self.expired() if model not in (keep or [])]
        assert max((model.expires for model in evicted), default=0.0) <= min(stays, default=inf)

    def see_refusal(self, refusal: CacheFull | InvalidRequest, refused: Operation) -> None:
        """An append is refused only if pages are lacking, and no cache is left to evict."""
        available = self.store.free_pages - self.store.reserved_pages
        layers = [(model, layer) for model, layer, _ in refused.wanted]
        promised = sum(model.cache.layers[layer].promised for model, layer in layers)
        needed = sum(self.pages_to_come(*of, [*self.foreseen(of[0]), refused]) for of in layers)
        assert needed - promised > available
        if isinstance(refusal, CacheFull):
            assert refusal.metadata == {"bound": "cache_bytes", "free_bytes": str(available * PAGE_BYTES)}
            assert not set(self.expired()) - set(refused.models)
        alone = sum(-(-len(new) // PAGE_TOKENS) for _, _, new in refused.wanted)
        assert isinstance(refusal, InvalidRequest) == (alone > PAGES)

    def foreseen(self, model: Model) -> list[Operation]:
        """The operations that wait for a cache and are foreseen to happen."""
        return [operation for operation in self.waiting(model) if operation.foreseen]

    # What always holds

    @invariant()
    def the_free_is_somebody_elses(self) -> None:
        held = self.holders()
        for page, slots in enumerate(self.memory):
            if not held[page]:
                slots[:] = [NOBODYS] * PAGE_TOKENS

    @invariant()
    def caches_have_their_tokens(self) -> None:
        for model in self.models:
            assert model.cache.lengths == [len(tokens) for tokens in model.tokens]
            if any(operation.state == "begun" for operation in model.waiting):
                continue
            for layer, tokens in enumerate(model.tokens):
                pages = model.cache.pages(layer)
                assert len(pages) == -(-len(tokens) // PAGE_TOKENS)
                assert [slot for page in pages for slot in self.memory[page]][: len(tokens)] == tokens

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        held = self.holders()
        allocator = self.store._allocator
        assert {page for page in range(PAGES) if allocator._holders[page]} == set(held)
        assert all(model.cache.shared_bytes == self.shared_bytes(model) for model in self.models)
        assert {page for extent in extents_of(allocator._extents) for page in extent} == set(range(PAGES)) - set(held)
        assert self.store.free_pages + self.store.used_bytes // PAGE_BYTES == PAGES
        promised = sum(layer.promised for model in self.models for layer in model.cache.layers)
        assert promised == self.store.reserved_pages <= self.store.free_pages
        assert self.store.shared_bytes_saved == (held.total() - len(held)) * PAGE_BYTES
        assert self.store.tokens == sum(len(tokens) for model in self.models for tokens in model.tokens)
        pages = sum(len(layer) for model in self.models for layer in model.cache.layers)
        assert sum(self.store.bytes_of_owners().values()) == pages * PAGE_BYTES
        assert len(self.store) == len(self.present()) <= MAX_CACHES

    @invariant()
    def those_who_wait_are_promised_what_they_will_take(self) -> None:
        """Whatever others do until their turn, unless what waits ahead of them has not happened."""
        for model in self.models:
            line = self.foreseen(model)
            if line and not any(operation.surprised for operation in line):
                for layer in range(LAYERS):
                    assert model.cache.layers[layer].promised >= self.pages_to_come(model, layer, line)

    def teardown(self) -> None:
        """When all operations are over, everything is free."""
        for operation in self.operations:
            self.store.cancel(operation.reservation)
            for model in operation.models:
                self.store.release(model.cache, self.now)
        for model in self.models:
            self.store.delete(model.cache)
        assert (self.store.free_pages, self.store.reserved_pages, self.store.tokens) == (PAGES, 0, 0)
