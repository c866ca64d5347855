"""The whole contract through a real server on a CUDA device, against the oracle, within the contract's tolerances.

With `GPU_TESTS_ON=cpu` it runs on a CPU, to check the tests themselves without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import oracle
import pytest
import strategies
import torch
from bits import bits
from cases import DTYPES, Case, Plan
from conftest import Server, served
from features import FEATURES
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve import Client

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(600),
]
EVERY_DTYPE = pytest.mark.parametrize("dtype", sorted(DTYPES))
FEW = settings(max_examples=max(30, settings().max_examples // 2))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on the first such device, with very large batch limits."""
    flags = ("--device", DEVICE, "--max-batch-requests", "1024", "--max-batch-flops", "1e12")
    with served(flags, tmp_path_factory.mktemp("cuda-server")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    """A client of that server."""
    with Client(server.address) as client:
        yield client


def check_all(client: Client, cases: list[Case], **returned: Any) -> list[Any]:
    """Asserts that requests all in flight at once get the right results; returns these."""
    futures = [case.submit(client, **returned) for case in cases]
    results = [future.result() for future in futures]
    for case, result in zip(cases, results, strict=True):
        accuracy.check(case, result, returned.get("return_scores"))
    return results


@EVERY_DTYPE
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_alone(client: Client, feature: str, dtype: str) -> None:
    case = Plan(dtype=dtype, **FEATURES[feature]).case(1)
    accuracy.check(case, case.attend(client))
    accuracy.check(case, case.attend(client, return_lse=True))
    accuracy.check(case, case.attend(client, return_lse=True, return_scores="masked"), "masked")


@FEW
@given(
    plan=strategies.plans(), seed=strategies.SEEDS, lse=st.booleans(), scores=st.sampled_from([None, *oracle.STAGES])
)
def test_random_combinations(client: Client, plan: Plan, seed: int, lse: bool, scores: str | None) -> None:
    case = plan.case(seed)
    accuracy.check(case, case.attend(client, return_lse=lse, return_scores=scores), scores)


@FEW
@given(plans=st.lists(strategies.plans(), min_size=1, max_size=6), seeds=st.lists(strategies.SEEDS, min_size=4))
def test_random_batches(client: Client, plans: list[Plan], seeds: list[int]) -> None:
    check_all(client, [plan.case(seed) for plan in plans for seed in seeds[:8]], return_lse=True)


@EVERY_DTYPE
@pytest.mark.parametrize("layout", ["heads_first", "length_first", "packed"])
def test_hundreds_of_sequences_of_all_lengths(client: Client, layout: str, dtype: str) -> None:
    rng, cases = np.random.default_rng(0), []
    for seed in range(100):
        lengths = tuple(int(n) for n in rng.choice([1, 1, 2, 17, 64, 100], 4))
        kept = tuple(int(n) for n in np.array(lengths) + rng.choice([0, 1, 50, 131], 4))
        plan = Plan(dtype=dtype, layout=layout, head_dim=64, key_dim=64, value_dim=64, group=2, causal="bottom_right")
        if layout == "packed":
            plan = replace(plan, rank=3, batch=4, query_lengths=lengths, kv_lengths=kept)
            plan = replace(plan, query_length=max(lengths), key_length=max(kept))
        else:
            plan = replace(plan, query_length=lengths[0], key_length=kept[0])
        cases.append(plan.case(seed))
    results = check_all(client, cases, return_lse=True)
    assert max(result.batch_size for result in results) > 1


@EVERY_DTYPE
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 20)}, {"alibi": True}, {"softcap": 5.0}])
def test_long_sequences(client: Client, dtype: str, options: dict[str, Any]) -> None:
    """Longer than any kernel's blocks, and not multiples of any block size."""
    plan = Plan(dtype=dtype, batch=1, group=2, key_heads=1, query_length=1531, key_length=1777, **options)
    plan = replace(plan, head_dim=64, key_dim=64, value_dim=64)
    check_all(client, [plan.case(0)], return_lse=True)


KINDS: dict[str, dict[str, Any]] = {
    "causal": {"query_length": 33, "key_length": 33, "causal": True},
    "one query": {"query_length": 1, "key_length": 300},
    "one query, grouped": {"query_length": 1, "key_length": 300, "group": 4},
    "window": {"query_length": 40, "key_length": 40, "window": (9, 0)},
    "mask": {"mask_shape": (2, 1, 5, 7)},
    "bias": {"bias_shape": (5, 7)},
    "softcap": {"softcap": 2.0},
    "additive": {"score": "additive"},
}


@EVERY_DTYPE
@pytest.mark.parametrize("kind", KINDS)
def test_bits_in_batches_are_measured(client: Client, record_property: Any, capsys: Any, kind: str, dtype: str) -> None:
    """Results in batches are as right as alone. Whether the bits are equal is reported, not asserted."""
    plan = Plan(dtype=dtype, head_dim=64, key_dim=64, value_dim=64, **KINDS[kind])
    lengths = [plan] if plan.mask_shape or plan.bias_shape else [plan, replace(plan, key_length=plan.key_length + 9)]
    cases = [each.case(seed) for seed in range(32) for each in lengths]
    alone = [case.attend(client) for case in cases]
    together = check_all(client, cases)
    same = sum(bool((bits(one.output) == bits(other.output)).all()) for one, other in zip(alone, together, strict=True))
    record_property("same_bits", f"{same} of {len(cases)}")
    with capsys.disabled():
        print(f"\n{kind}, {dtype}: {same} of {len(cases)} have the bits that they have alone", end=" ")
