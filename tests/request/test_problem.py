"""What a request means: defaults, layouts and broadcasting; and which requests can run together."""

from __future__ import annotations

from typing import Any

import messages
import ml_dtypes
import numpy as np
import pytest
from whole_requests import (
    BASES,
    DK,
    HK,
    HQ,
    LQ,
    MASK,
    TENSORS,
    B,
    D,
    S,
    U,
    additive,
    at,
    broken,
    dot,
    general,
    learned,
    tensor,
    zeros,
)

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.requests.options import window_of
from attnserve_server.requests.problem import WRITTEN_OUT


@pytest.mark.parametrize("field", ["scale", "softcap"])
def test_zero_and_absent(field: str) -> None:
    message = messages.random_attend(0, 3, width=16)
    assert messages.read(message).problem.scale == 0.25
    setattr(message, field, 0.0)
    assert getattr(messages.read(message).problem, field) == 0.0


def test_defaults() -> None:
    problem = messages.read(messages.random_attend(0, 3, kv_length=4, batch=2, heads=4, kv_heads=2, width=8)).problem
    assert (problem.batch, problem.query_heads, problem.kv_heads) == (2, 4, 2)
    assert (problem.query_length, problem.kv_length) == (3, 4)
    assert (problem.head_dim, problem.key_dim, problem.value_dim) == (8, 8, 8)
    assert problem.scale == pytest.approx(8**-0.5, rel=1e-15)
    assert (problem.softcap, problem.window) == (0.0, (-1, -1))
    assert (problem.bottom_right, problem.needs_positions, problem.score) == (False, False, None)
    assert (problem.return_lse, problem.return_scores, problem.priority) == (False, None, 0)
    assert (problem.rank, problem.packed, problem.length_first) == (4, False, False)


def test_the_scale_of_learned_scores_is_1() -> None:
    assert messages.read(general()).problem.scale == 1.0
    assert messages.read(additive()).problem.scale == 1.0


@pytest.mark.parametrize(
    ("layout", "query", "key", "axes"),
    [
        (pb.LAYOUT_UNSPECIFIED, (2, 4, 3, 8), (2, 2, 5, 8), (2, 4, 2, 3, 5)),
        (pb.LAYOUT_HEADS_FIRST, (2, 4, 3, 8), (2, 2, 5, 8), (2, 4, 2, 3, 5)),
        (pb.LAYOUT_LENGTH_FIRST, (2, 3, 4, 8), (2, 5, 2, 8), (2, 4, 2, 3, 5)),
        (pb.LAYOUT_HEADS_FIRST, (4, 3, 8), (2, 5, 8), (1, 4, 2, 3, 5)),
        (pb.LAYOUT_LENGTH_FIRST, (3, 4, 8), (5, 2, 8), (1, 4, 2, 3, 5)),
        (pb.LAYOUT_HEADS_FIRST, (3, 8), (5, 8), (1, 1, 1, 3, 5)),
        (pb.LAYOUT_LENGTH_FIRST, (3, 8), (5, 8), (1, 1, 1, 3, 5)),
    ],
)
def test_layouts_and_ranks(
    layout: int, query: tuple[int, ...], key: tuple[int, ...], axes: tuple[int, int, int, int, int]
) -> None:
    problem = messages.read(messages.attend(zeros(*query), zeros(*key), zeros(*key), layout=layout)).problem
    assert (
        problem.batch,
        problem.query_heads,
        problem.kv_heads,
        problem.query_length,
        problem.kv_length,
    ) == axes
    assert problem.rank == len(query)


@pytest.mark.parametrize(
    "shape", [(), (1,), (S,), (LQ, 1), (LQ, S), (1, 1), (HQ, 1, S), (1, LQ, S), (B, 1, 1, 1), (B, HQ, LQ, S)]
)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_what_broadcasts_is_taken(name: str, shape: tuple[int, ...]) -> None:
    spec = messages.read(broken("dot", name, tensor(*shape, dtype=TENSORS[name][1]))).problem.tensors[name]
    assert spec.shape == shape


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("path", ["bias", "alibi_slopes", "sinks", "general.weight", "additive.key_weight"])
def test_parameters_may_have_any_floating_dtype(path: str, dtype: Any) -> None:
    base, _ = TENSORS[path]
    shape = tuple(at(BASES[base](), path).shape)
    messages.read(broken(base, path, tensor(*shape, dtype=dtype)))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, (-1, -1)),
        (pb.Window(), (-1, -1)),
        (pb.Window(left=2), (2, -1)),
        (pb.Window(right=2), (-1, 2)),
        (pb.Window(left=0), (0, -1)),
        (pb.Window(right=0), (-1, 0)),
        (pb.Window(left=0, right=0), (0, 0)),
        (pb.Window(left=-1, right=3), (-1, 3)),
        (pb.Window(left=-1, right=-1), (-1, -1)),
    ],
    ids=repr,
)
def test_a_side_of_a_window_that_is_not_given_is_open(window: pb.Window | None, expected: tuple[int, int]) -> None:
    """And 0 is a bound, whether or not the other side has one."""
    assert messages.read(messages.random_attend(0, 3, window=window)).problem.window == expected
    causal = messages.read(messages.random_attend(0, 3, window=window, causal=True))
    assert causal.problem.window == (expected[0], 0)
    assert window_of(pb.ApplyRequest(window=window)) == expected


def test_windows_wider_than_any_distance_are_open() -> None:
    message = messages.random_attend(0, 3, window=pb.Window(left=2**63 - 1, right=2**41))
    assert messages.read(message).problem.window == (-1, 2**41)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"causal": True}, {}),
        ({"scale": 1.0}, {"scale": 2.0}),
        ({"softcap": 1.0}, {}),
        ({"return_lse": True}, {}),
        ({"return_scores": pb.SCORE_STAGE_RAW}, {"return_scores": pb.SCORE_STAGE_WEIGHTS}),
        ({"window": pb.Window(left=1, right=0)}, {"window": pb.Window(left=1, right=1)}),
        ({"sinks": zeros(2)}, {}),
        ({"alibi_slopes": zeros(2)}, {}),
        ({"mask": zeros(3, 3, dtype=MASK)}, {}),
        ({"bias": zeros(3, 3)}, {}),
        ({"dtype": np.float16}, {}),
        ({"heads": 4}, {}),
        ({"heads": 4, "kv_heads": 2}, {"heads": 4}),
        ({"width": 16}, {}),
    ],
    ids=lambda fields: "-".join(fields) or "none",
)
def test_what_cannot_run_together_has_different_groups(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert messages.read(messages.random_attend(0, **one)).problem.group != (
        messages.read(messages.random_attend(0, **other)).problem.group
    )


def test_lengths_contents_and_priorities_do_not_keep_requests_apart() -> None:
    groups = {
        messages.read(
            messages.random_attend(seed, length, kv_length=keys, batch=batch, priority=priority)
        ).problem.group
        for seed, (length, keys, batch, priority) in enumerate([(1, 1, 1, 0), (3, 9, 2, 8), (0, 0, 0, -8)])
    }
    assert len(groups) == 1


def test_an_additive_score_may_have_a_single_hidden_unit() -> None:
    problem = messages.read(learned(additive=pb.AdditiveScore(query_weight=tensor(1, D), key_weight=tensor(1, DK))))
    assert problem.problem.tensors["additive.query_weight"].shape == (1, D)


def test_only_an_additive_score_needs_memory_for_its_hidden_units() -> None:
    """For keys projected to them, twice, in float64."""
    assert messages.read(additive()).scratch_bytes == 2 * 8 * U * HK * S
    for other in (dot(), general()):
        assert messages.read(other).scratch_bytes == 0


def test_what_is_computed_by_other_means_is_another_kind_of_work() -> None:
    plain, softcapped = messages.random_attend(0), messages.random_attend(0, softcap=1.0)
    kinds = [messages.read(each).problem.kind for each in (plain, general(), additive(), softcapped)]
    assert len(set(kinds)) == 4
    assert messages.read(messages.random_attend(0, causal=True)).problem.kind == kinds[0]


def test_work_of_which_few_queries_share_the_reading_of_a_key_is_another_kind() -> None:
    """A FLOP of theirs takes longer; heads that share keys read them once."""

    def kind(rows: int, **fields: Any) -> str:
        return messages.read(messages.random_attend(0, rows, kv_length=64, **fields)).problem.kind

    kinds = [kind(rows) for rows in (1, 2, 8, 32)]
    assert len(set(kinds)) == 4
    assert [kind(rows) for rows in (0, 7, 31, 500)] == kinds
    assert kind(4, heads=8, kv_heads=1) == kinds[3]
    rows, lengths = np.zeros((64, 4, 8), np.float32), np.full(16, 4)
    packed = messages.attend(rows, rows, rows, layout=pb.LAYOUT_PACKED, query_lengths=lengths, kv_lengths=lengths)
    assert messages.read(packed).problem.kind == kinds[1], "4 queries a sequence"
    assert kind(4, batch=16) == kinds[1], "sequences do not share keys"


@pytest.mark.parametrize("hides", [{}, {"mask": np.ones((3, 3), bool)}, {"bias": np.zeros((3, 3), np.float32)}])
def test_alibi_beside_what_may_hide_keys_is_written_out_and_costs_so(hides: dict[str, Any]) -> None:
    """Kernels measure it from the nearest key, which may be hidden."""
    slopes = np.ones(2, np.float32)
    alone = messages.read(messages.random_attend(0, **hides)).problem
    beside = messages.read(messages.random_attend(0, alibi_slopes=slopes, **hides)).problem
    assert (alone.weight, beside.weight) == (1, WRITTEN_OUT if hides else 1)
    assert (beside.kind == alone.kind) is not bool(hides)
