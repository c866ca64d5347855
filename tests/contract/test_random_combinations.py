"""Random combinations of all request options, through the real server against the oracle."""

from __future__ import annotations

import accuracy
import oracle
import strategies
from cases import Plan
from hypothesis import given
from hypothesis import strategies as st

from attnserve import Client


@strategies.MANY
@given(
    plan=strategies.plans(), seed=strategies.SEEDS, lse=st.booleans(), scores=st.sampled_from([None, *oracle.STAGES])
)
def test_random_combinations(client: Client, plan: Plan, seed: int, lse: bool, scores: str | None) -> None:
    case = plan.case(seed)
    result = case.attend(client, return_lse=lse, return_scores=scores)
    assert (result.lse is not None) == lse
    assert (result.scores is not None) == (scores is not None)
    accuracy.check(case, result, scores)
