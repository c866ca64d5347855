"""The store against a trivial model: caches are lists of tokens, and the memory is a table that obeys placements.

Operations arrive, wait for their turn on each of their caches, and begin; the memory is written later, in any order,
as a device would; some are given up or fail. Whatever is free is overwritten all the time, as its next owner would. So
a page that is freed too soon, or shared too long, shows as tokens that nobody appended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.layer import Placement
from attnserve_server.caches.reservation import Reservation
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.store import CacheStore
from attnserve_server.errors import InvalidRequest, NotFound, Overloaded

LAYERS = 2
SHAPE = CacheShape(num_kv_heads=1, head_dim=8, value_dim=8, layers=LAYERS, dtype="float32")
PAGE_TOKENS = 4
PAGE_BYTES = 256
PAGES = 14
MAX_CACHES = 5
INDEX = st.integers(0, 99)
TOKENS = [1, 5, 3, 2, 1, 6, 0, 11, 30]
WEIGHTS = [9, 4, 2, 12, 2, 1, 2, 1]
"""How often a walk does what."""
UNTIL = st.sampled_from(["waiting", "begun", "over", "over"])
"""How far an operation gets at once."""
NOBODYS = -1
"""What is in the memory where it is free."""


@dataclass(eq=False)
class Model:
    """What a cache should be."""

    cache: Cache
    tokens: list[list[int]]
    ttl: float | None
    expires: float
    waiting: list[Operation] = field(default_factory=list)
    users: int = 0
    deleted: bool = False


@dataclass(eq=False)
class Operation:
    """Something that waits for its turn on its caches, or has it, or is over and about to leave."""

    models: list[Model]
    reservation: Reservation | None = None
    wanted: list[tuple[Model, int, list[int]]] = field(default_factory=list)
    """What is appended to which layer."""
    fork_ttl: float | None = None
    truncate_to: int | None = None
    placements: list[Placement] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    state: str = "waiting"


class StoreMachine(RuleBasedStateMachine):
    """Operations in flight on a few caches in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.store = CacheStore(PAGES * PAGE_BYTES, PAGE_BYTES, MAX_CACHES)
        self.memory = [[NOBODYS] * PAGE_TOKENS for _ in range(PAGES)]
        self.models: list[Model] = []
        self.operations: list[Operation] = []
        self.token = count()
        self.now = 0.0

    # What happens

    @initialize(tokens=st.sampled_from([6, 4, 9]))
    def begins_with_a_cache(self, tokens: int) -> None:
        self.create(None)
        self.append(self.present(), [tokens] * LAYERS, "over")

    @rule(seconds=st.sampled_from([0.5, 4.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(ttl=st.sampled_from([None, 5.0, 20.0, None, 1.0]))
    def is_created(self, ttl: float | None) -> None:
        self.create(ttl)

    def create(self, ttl: float | None) -> None:
        try:
            cache = self.store.create(SHAPE, ttl, self.now)
        except Overloaded:
            self.see_evictions()
            assert len(self.present()) == MAX_CACHES
            assert not self.expired()
        else:
            self.see_evictions()
            self.add(cache, [[] for _ in range(LAYERS)], ttl)

    @rule(
        which=INDEX,
        tokens=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=LAYERS),
        caches=st.sampled_from([1, 1, 2]),
        until=UNTIL,
    )
    @precondition(lambda self: self.present())
    def append_arrives(self, which: int, tokens: list[int], caches: int, until: str) -> None:
        present = self.present()
        chosen = [present[(which + index) % len(present)] for index in range(min(caches, len(present)))]
        if models := [model for model in chosen if self.found(model)]:
            self.append(models, tokens, until)

    def append(self, models: list[Model], tokens: list[int], until: str) -> None:
        """So many tokens for each layer of some caches."""
        wanted = [
            (model, layer, [next(self.token) for _ in range(new)])
            for model in models
            for layer, new in enumerate(tokens)
        ]
        busy = {model for model in models if model.users}
        try:
            reservation = self.store.reserve([(m.cache, layer, len(new)) for m, layer, new in wanted], self.now)
        except (CacheFull, InvalidRequest) as refusal:
            self.see_evictions(keep=models)
            self.see_refusal(refusal, wanted, busy)
            return
        self.see_evictions(keep=models)
        assert reservation.pages == self.pages_needed(wanted, busy)
        self.arrive(Operation(models, reservation, wanted), until)

    @rule(which=INDEX, ttl=st.sampled_from([None, 5.0]), until=UNTIL)
    @precondition(lambda self: self.present())
    def fork_arrives(self, which: int, ttl: float | None, until: str) -> None:
        model = self.present()[which % len(self.present())]
        if self.found(model):
            self.arrive(Operation([model], fork_ttl=ttl), until)

    @rule(which=INDEX, share=st.floats(0, 1.1), until=UNTIL)
    @precondition(lambda self: self.present())
    def truncate_arrives(self, which: int, share: float, until: str) -> None:
        model = self.present()[which % len(self.present())]
        if self.found(model):
            self.arrive(Operation([model], truncate_to=int(share * max(map(len, model.tokens)))), until)

    @rule(which=INDEX, fails=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.operations)
    def goes_on(self, which: int, fails: bool) -> None:
        """An operation does its next step, or is given up or fails instead."""
        operation = self.operations[which % len(self.operations)]
        match operation.state:
            case "waiting" if fails:
                self.end_turn(operation)
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
        """What an operation does, as far as `until`, if nothing goes wrong and its turn has come."""
        if operation.state == "waiting" != until and self.has_turn(operation):
            self.begin(operation)
        if operation.state == "begun" != until:
            self.write(operation)
        if operation.state == "written" != until:
            self.end_turn(operation)

    def begin(self, operation: Operation) -> None:
        if operation.reservation is not None:
            operation.state = "begun"
            operation.before = [len(model.tokens[layer]) for model, layer, _ in operation.wanted]
            for model, layer, new in operation.wanted:
                operation.placements.append(self.store.append(model.cache, layer, len(new), operation.reservation))
                model.tokens[layer].extend(new)
        elif operation.truncate_to is not None:
            self.truncate(operation.models[0], operation.truncate_to)
            self.end_turn(operation)
        else:
            self.fork(operation.models[0], operation.fork_ttl)
            self.end_turn(operation)

    def truncate(self, model: Model, length: int) -> None:
        longest = max(map(len, model.tokens))
        if length > longest:
            with pytest.raises(InvalidRequest):
                self.store.truncate(model.cache, length)
            return
        self.store.truncate(model.cache, length)
        for tokens in model.tokens:
            del tokens[length:]

    def fork(self, model: Model, ttl: float | None) -> None:
        if model.deleted:
            with pytest.raises(NotFound):
                self.store.fork(model.cache, ttl, self.now)
            return
        try:
            fork = self.store.fork(model.cache, ttl, self.now)
        except Overloaded:
            self.see_evictions()
            assert len(self.present()) == MAX_CACHES
            assert not self.expired()
        else:
            self.see_evictions()
            self.add(fork, [list(tokens) for tokens in model.tokens], ttl)
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
        assert operation.reservation is not None
        self.store.undo(operation.reservation)
        for (model, layer, _), before in zip(operation.wanted, operation.before, strict=True):
            del model.tokens[layer][before:]
        self.end_turn(operation)

    def leave(self, operation: Operation) -> None:
        self.operations.remove(operation)
        if operation.reservation is not None:
            self.store.cancel(operation.reservation)
        for model in operation.models:
            self.store.release(model.cache, self.now)
            model.users -= 1
            self.renew(model)
        self.models = [model for model in self.models if model.users or not model.deleted]

    @rule(which=INDEX)
    @precondition(lambda self: len(self.present()) > 2)
    def is_deleted(self, which: int) -> None:
        model = self.present()[which % len(self.present())]
        self.store.delete(model.cache)
        model.deleted = True
        self.models = [model for model in self.models if model.users or not model.deleted]

    @rule()
    def listed(self) -> None:
        caches = self.store.list(None, self.now)
        self.see_evictions()
        assert not self.expired()
        assert caches == [model.cache for model in self.present()]

    # What the model knows

    def has_turn(self, operation: Operation) -> bool:
        return all(model.waiting[0] is operation for model in operation.models)

    def present(self) -> list[Model]:
        return [model for model in self.models if not model.deleted]

    def expired(self) -> list[Model]:
        return [model for model in self.present() if not model.users and model.expires <= self.now]

    def found(self, model: Model) -> bool:
        """Whether a request finds the cache; as it must exactly if its lease has not ended."""
        if model in self.expired():
            with pytest.raises(NotFound):
                self.store.get(model.cache.name, self.now)
            self.models.remove(model)
            return False
        assert self.store.get(model.cache.name, self.now) is model.cache
        return True

    def add(self, cache: Cache, tokens: list[list[int]], ttl: float | None) -> None:
        self.models.append(Model(cache, tokens, ttl, float("inf")))
        self.renew(self.models[-1])

    def renew(self, model: Model) -> None:
        model.expires = float("inf") if model.ttl is None else self.now + model.ttl

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
        """Caches that went by themselves had expired, and none that stays has expired longer ago."""
        evicted = [model for model in self.present() if model.cache.gone]
        assert set(evicted) <= set(self.expired()) - set(keep or [])
        self.models = [model for model in self.models if model not in evicted]
        stays = [model.expires for model in self.expired() if model not in (keep or [])]
        assert max((model.expires for model in evicted), default=0.0) <= min(stays, default=float("inf"))

    def see_refusal(
        self, refusal: CacheFull | InvalidRequest, wanted: list[tuple[Model, int, list[int]]], busy: set[Model]
    ) -> None:
        """An append is refused only where the pages are not there, and nobody is left to evict."""
        available = self.store.free_pages - self.store.reserved_pages
        assert self.pages_needed(wanted, busy) > available
        if isinstance(refusal, CacheFull):
            assert refusal.free_bytes == available * PAGE_BYTES
            assert not set(self.expired()) - {model for model, _, _ in wanted}
        else:
            assert self.pages_needed(wanted, set()) > PAGES

    def pages_needed(self, wanted: list[tuple[Model, int, list[int]]], busy: set[Model]) -> int:
        """What the caches of these appends must be promised."""
        needed, holders = 0, self.holders()
        for model, layer, new in wanted:
            length, pages = len(model.tokens[layer]), model.cache.pages(layer)
            if not new:
                continue
            if model in busy:
                needed += 1 + -(-(len(new) - 1) // PAGE_TOKENS)
            else:
                copies = length % PAGE_TOKENS > 0 and holders[pages[-1]] > 1
                needed += -(-(length + len(new)) // PAGE_TOKENS) - len(pages) + copies
        return needed

    def holders(self) -> Counter[int]:
        """Who holds each page: layers, and operations that may still be copying it."""
        held = Counter(page for model in self.models for layer in range(LAYERS) for page in model.cache.pages(layer))
        reservations = [operation.reservation for operation in self.operations if operation.reservation is not None]
        held.update(a.copied for r in reservations for a in r.appends.values() if a.copied is not None)
        return held

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
        assert [held[page] for page in range(PAGES)] == allocator.holders().tolist()
        assert {page for stretch in allocator.free_stretches() for page in stretch} == set(range(PAGES)) - set(held)
        assert self.store.free_pages + self.store.used_bytes // PAGE_BYTES == PAGES
        promised = sum(operation.reservation.pages for operation in self.operations if operation.reservation)
        assert promised == self.store.reserved_pages <= self.store.free_pages
        assert self.store.shared_bytes_saved == (held.total() - len(held)) * PAGE_BYTES
        assert self.store.tokens == sum(len(tokens) for model in self.models for tokens in model.tokens)
        assert len(self.store) == len(self.present()) <= MAX_CACHES

    def teardown(self) -> None:
        """When all is over, everything is free."""
        for operation in self.operations:
            if operation.reservation is not None:
                self.store.cancel(operation.reservation)
            for model in operation.models:
                self.store.release(model.cache, self.now)
        for model in self.models:
            self.store.delete(model.cache)
        assert (self.store.free_pages, self.store.reserved_pages, self.store.tokens) == (PAGES, 0, 0)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk(seed: int) -> None:
    """The same machine, far from its start: a busy server's share of appends and forks, a step at a time."""
    random, machine = Random(seed), StoreMachine()
    machine.begins_with_a_cache(6)

    def until() -> str:
        return random.choice(["waiting", "begun", "over", "over"])

    for _ in range(5000):
        which, present = random.randrange(100), len(machine.present())
        match random.choices(["append", "fork", "truncate", "go on", "create", "delete", "time", "all"], WEIGHTS)[0]:
            case "append" if present:
                tokens = random.choices(TOKENS[:-1], k=random.randint(1, LAYERS))
                machine.append_arrives(which, tokens, random.randint(1, 2), until())
            case "fork" if present:
                machine.fork_arrives(which, random.choice([None, 5.0]), until())
            case "truncate" if present:
                machine.truncate_arrives(which, random.random(), until())
            case "go on" if machine.operations:
                machine.goes_on(which, random.random() < 0.2)
            case "create":
                machine.create(random.choice([None, 5.0, 20.0]))
            case "delete" if present > 2:
                machine.is_deleted(which)
            case "time":
                machine.time_passes(random.choice([0.5, 4.0]))
            case "all":
                machine.everything_runs()
        machine.the_free_is_somebody_elses()
        machine.caches_have_their_tokens()
        machine.every_page_is_accounted_for()
    assert machine.store.counts.appends > 300
    assert machine.store.counts.forks > 50
    machine.teardown()
