"""Turns, checked against a model: it is one's turn when nobody earlier needs the same thing, unless both share it."""

from __future__ import annotations

from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY

from attnserve_server.scheduling.turns import Turns

THINGS = "abcd"


class Model:
    """Everybody present, in order of entry."""

    def __init__(self) -> None:
        self.present: dict[int, tuple[Set[str], bool]] = {}

    def ready(self) -> set[int]:
        """Everybody whose turn it is."""
        found, needed, alone = set(), set[str](), set[str]()
        for who, (needs, shares) in self.present.items():
            if not needs & (alone if shares else needed):
                found.add(who)
            needed |= needs
            alone |= set() if shares else needs
        return found


@MANY
@given(st.data())
def test_turns_are_those_of_the_model(data: st.DataObject) -> None:
    """They enter and leave in any order; in the end all have had their turn, and nothing is kept of them."""
    turns: Turns[int] = Turns()
    model = Model()
    entered = 0
    needs_of = st.tuples(st.lists(st.sampled_from(THINGS), unique=True, max_size=len(THINGS)), st.booleans())
    steps = data.draw(st.lists(st.one_of(st.none(), needs_of), max_size=40), label="enter, or one leaves")
    # After those steps everybody present leaves, in any order.
    for needs in [*steps, *[None] * len(steps)]:
        before = model.ready()
        if needs is not None:
            things, shares = needs
            model.present[entered] = frozenset(things), shares
            assert turns.enter(entered, things, shares) == (entered in model.ready())
            assert before <= model.ready()
            entered += 1
        elif before:
            who = data.draw(st.sampled_from(sorted(before)), label="leaves")
            del model.present[who]
            now_ready = turns.leave(who)
            assert len(now_ready) == len(set(now_ready))
            assert set(now_ready) == model.ready() - before
        else:
            assert not model.present, "some are there, and it is nobody's turn"
        assert len(turns.waiting) == len(model.present) - len(model.ready())
    assert not model.present
    assert all(turns.enter(entered + place, [thing], shares=False) for place, thing in enumerate(THINGS))


@given(st.lists(st.lists(st.sampled_from(THINGS), unique=True, min_size=1), max_size=30))
def test_of_those_who_need_the_same_thing_each_comes_after_the_one_before(needs: list[list[str]]) -> None:
    turns: Turns[int] = Turns()
    ready = [who for who, each in enumerate(needs) if turns.enter(who, each, shares=False)]
    order = []
    while ready:
        order.append(ready.pop())  # last first: fairness is not up to the callers
        ready += turns.leave(order[-1])
    assert sorted(order) == list(range(len(needs)))
    for thing in THINGS:
        in_line = [who for who in order if thing in needs[who]]
        assert in_line == sorted(in_line)


def test_who_needs_two_things_holds_up_neither_longer_than_the_order_says() -> None:
    turns: Turns[str] = Turns()
    assert turns.enter("first", "a", shares=False)
    assert not turns.enter("both", "ab", shares=False)
    assert not turns.enter("behind", "b", shares=False)
    assert turns.enter("elsewhere", "c", shares=False)
    assert len(turns.waiting) == 2
    assert turns.leave("elsewhere") == []
    assert turns.leave("first") == ["both"]
    assert turns.leave("both") == ["behind"]
    assert turns.leave("behind") == []


def test_who_only_shares_a_thing_has_it_together_with_others() -> None:
    """But not before an earlier one that wants it exclusively."""
    turns: Turns[str] = Turns()
    assert turns.enter("one", "ab", shares=True)
    assert turns.enter("other", "a", shares=True)
    assert not turns.enter("alone", "a", shares=False)
    assert not turns.enter("behind", "a", shares=True)
    assert not turns.enter("behind too", "a", shares=True)
    assert turns.leave("one") == []
    assert turns.leave("other") == ["alone"]
    assert turns.leave("alone") == ["behind", "behind too"]
    assert turns.leave("behind") == turns.leave("behind too") == []


@given(st.data())
def test_who_waits_may_give_up(data: st.DataObject) -> None:
    """One may leave whether or not its turn has come; the others' turns follow the same rule."""
    turns: Turns[int] = Turns()
    model = Model()
    needs_of = st.tuples(st.lists(st.sampled_from(THINGS), unique=True, min_size=1), st.booleans())
    for who, (needs, shares) in enumerate(data.draw(st.lists(needs_of, max_size=12))):
        model.present[who] = frozenset(needs), shares
        assert turns.enter(who, needs, shares) == (who in model.ready())
    while model.present:
        before = model.ready()
        assert {who for who in model.present if turns.waits(who)} == model.present.keys() - before
        who = data.draw(st.sampled_from(sorted(model.present)), label="leaves")
        del model.present[who]
        assert set(turns.leave(who)) == model.ready() - before
    assert not turns.waiting
    assert (turns._lines, turns._entered) == ({}, {})


def test_nobody_leaves_who_is_not_there() -> None:
    turns: Turns[str] = Turns()
    with pytest.raises(KeyError):
        turns.leave("nobody")
