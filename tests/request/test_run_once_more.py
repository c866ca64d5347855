"""Requests that run once more, for the sequences that hold NaN or infinities."""

from __future__ import annotations

from itertools import combinations, pairwise

import messages
import numpy as np

from attnserve_server.requests.extent import NOT_FINITE_CALL_COST, NOT_FINITE_COST, Span
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import RequestResult
from attnserve_server.settings.config import Config

LACKS = RequestResult(memoryview(b""), None, None)


def test_they_cost_all_keys_of_the_sequences_that_lack() -> None:
    whole, causal = (
        messages.read(messages.random_attend(0, 16, batch=4, width=64, causal=causal)) for causal in (False, True)
    )
    for missing in ([2], [0, 1, 3]):
        cost = causal.but_for(missing, LACKS).extent.cost
        assert cost == NOT_FINITE_CALL_COST + len(missing) * NOT_FINITE_COST * whole.effort // 4
        assert cost > Config().inline_flops, "it is not computed on the event loop"


def test_they_hold_up_no_others_and_their_speed_is_learnt_apart() -> None:
    plain, softcapped = messages.read(messages.random_attend(0)), messages.read(messages.random_attend(0, softcap=1.0))
    again = plain.but_for([0], LACKS)
    assert len({plain.group, softcapped.group, again.group}) == 3
    assert len({plain.kind, softcapped.kind, again.kind}) == 3
    assert plain.kind == plain.problem.kind


def sequences(request: Request) -> list[Span]:
    """Each sequence of a request by itself."""
    return [span._replace(first=span.first + n, sequences=1) for span in request.spans for n in range(span.sequences)]


def test_some_sequences_are_as_they_were_and_neighbours_of_equal_lengths_are_one_span() -> None:
    lengths = np.array([5, 5, 2, 2, 2, 0, 5])
    message = messages.random_attend(0, 3, kv_length=5, batch=len(lengths), kv_lengths=lengths, causal=True)
    whole = messages.read(message)
    for count in range(1, len(lengths) + 1):
        for places in combinations(range(len(lengths)), count):
            some = whole.of_sequences(places)
            assert sequences(some) == [sequences(whole)[place] for place in places]
            assert not any(
                before.first + before.sequences == after.first and before.kv_length == after.kv_length
                for before, after in pairwise(some.spans)
            )
            assert some.extent.flops == whole.extent.flops * count // len(lengths)
