"""The store, in random operations of a few callers, does what a trivial model does (`store_machine.py`)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from modelled import LAYERS
from store_machine import TOKENS, StoreMachine

WEIGHTS = [9, 4, 2, 12, 2, 1, 2, 1]
"""How often a walk takes each action."""

TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk(seed: int) -> None:
    """The same machine, far from its start, with a busy server's mix of appends and forks, a step at a time."""
    random, machine = Random(seed), StoreMachine()
    machine.begins_with_a_cache(6)

    def until() -> str:
        return random.choice(["waiting", "begun", "over", "over"])

    def some() -> list[int]:
        return random.choices(range(4), k=random.choice([1, 1, 2]))

    for _ in range(5000):
        which, present = random.randrange(4), len(machine.present())
        match random.choices(["append", "fork", "truncate", "go on", "create", "delete", "time", "all"], WEIGHTS)[0]:
            case "append" if present:
                tokens = random.choices(TOKENS[:-1], k=random.randint(1, LAYERS))
                machine.append_arrives(which, tokens, random.randint(1, 2), until(), random.random() < 0.9)
            case "fork" if present:
                machine.fork_arrives(some(), random.choice([None, 5.0]), until())
            case "truncate" if present:
                machine.truncate_arrives(some(), random.random(), until(), random.random() < 0.9)
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
        machine.those_who_wait_are_promised_what_they_will_take()
    assert machine.store.counts.appends > 300
    assert machine.store.counts.forks > 50
    machine.teardown()
