"""Passages from one attention to the next by the native library: their results, and what a row's bits may depend on."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from binding import BFLOAT, DTYPES, each_instructions, unaided
from bits import assert_same_bits
from hypothesis import given, settings
from kernel_calls import array
from random_calls import randoms
from random_passages import activated, random_passage

from attnserve_server.native.library import Team, Threads
from attnserve_server.native.passages import ACTIVATION_CODES, Forward, Norm, Passage, Passages
from attnserve_server.native.products import PackedWeight


@each_instructions
@settings(max_examples=100)
@given(random=randoms)
def test_it_is_the_passage(instructions: str, random: Random) -> None:
    each = random_passage(random)
    each.assert_right(each.outcome(Passages(instructions, unaided)))


@each_instructions
@settings(max_examples=40)
@given(random=randoms)
def test_a_rows_bits_follow_from_it_alone(instructions: str, random: Random) -> None:
    """Not from the other rows, their number or their addresses."""
    passages, each = Passages(instructions, unaided), random_passage(random)
    first = random.randrange(len(each.rows))
    some = slice(first, random.randint(first + 1, len(each.rows)))
    whole, part = each.outcome(passages), each.outcome(passages, some)
    for of_all, of_some in zip(whole, part, strict=True):
        assert_same_bits(array(of_some), array(of_all[some]))


@each_instructions
@settings(max_examples=25)
@given(random=randoms)
def test_nor_from_who_computes_them(instructions: str, random: Random) -> None:
    """Few rows are computed step by step by all threads, many by each thread from end to end."""
    each = random_passage(random, (1, 5, 30, 130, 300))
    alone = each.outcome(Passages(instructions, unaided))
    team = Team(3, patient=True)
    try:
        helpers = random.randint(1, 3)
        shared = each.outcome(Passages(instructions, lambda effort: Threads(team, helpers)))
    finally:
        team.close()
    for found, expected in zip(shared, alone, strict=True):
        assert_same_bits(array(found), array(expected))
    each.assert_right(shared)


@each_instructions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row(instructions: str, dtype: np.dtype[Any]) -> None:
    passages = Passages(instructions, unaided)
    for seed in range(20):
        each = random_passage(Random(seed), (30,), dtype=dtype)
        clean = each.outcome(passages)
        each.rows[7], each.rows[20, 3] = torch.inf, torch.nan
        found = each.outcome(passages)
        others = [row for row in range(30) if row not in (7, 20)]
        for of_clean, of_found in zip(clean, found, strict=True):
            assert not of_found[7].isfinite().all()
            assert of_found[20].isnan().any()
            assert_same_bits(array(of_found[others]), array(of_clean[others]))


@each_instructions
@pytest.mark.parametrize("name", ACTIVATION_CODES)
def test_activations_are_as_exact_as_float32(instructions: str, name: str) -> None:
    """Relatively, also where they are almost 0, and far away."""
    size = np.concatenate([np.linspace(0, 15, 20_000), np.logspace(-30, 1.1, 4_000)]).astype(np.float32)
    ends = np.float32([1e30, 200, -200, -1e30] * 4)
    given = np.concatenate([-size, size, ends]).reshape(-1, 16)
    # The first half of a row goes through the activation to the second half, which is 0 before.
    rows = torch.from_numpy(np.concatenate([given, np.zeros_like(given)], 1))
    up, down = torch.eye(16, 32), torch.zeros(32, 16)
    down[16:] = torch.eye(16)
    forward = Forward(None, PackedWeight.of(up, None), name, False, PackedWeight.of(down, None), None)
    passage = Passage(width=32, dtype=torch.float32, forward=forward)
    found = Passages(instructions, unaided).run(passage, torch.zeros_like(rows), rows, None)[0][:, 16:]
    expected = activated(name, given.astype(np.float64))
    # Below 1e-36 exponentials are 0; and the tanh is one of a cubic function, which float32 rounds.
    near, tiny = 1e-5 if name == "gelu_tanh" else 1e-6, 1e-36
    error = np.abs(found.double().numpy() - expected)
    assert (error <= near * np.abs(expected) + tiny).all(), (error / (np.abs(expected) + tiny)).max()


@each_instructions
def test_norms_of_large_and_of_equal_numbers(instructions: str) -> None:
    """A mean much larger than the deviations loses no more digits than float32 has; equal numbers give the bias."""
    draw, bias = np.random.default_rng(0), torch.arange(64, dtype=torch.float32)
    rows = torch.from_numpy((1000 + draw.standard_normal((5, 64))).astype(np.float32))
    rows[4] = 7.0
    for kind in ("layer", "rms"):
        norm = Norm(kind, None, bias, 1e-12)  # type: ignore[arg-type]
        passage = Passage(width=64, dtype=torch.float32, before=norm)
        wide = rows.double()
        wide = wide - wide.mean(1, keepdim=True) if kind == "layer" else wide
        expected = wide / (wide.square().mean(1, keepdim=True) + 1e-12).sqrt() + bias
        behind, found = Passages(instructions, unaided).run(passage, rows, None, None)
        assert behind is rows
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-4 if kind == "layer" else 1e-5)


@each_instructions
def test_what_does_not_fit_is_refused(instructions: str) -> None:
    drawn = (random_passage(Random(seed), (4,), dtype=np.dtype(np.float32)) for seed in itertools.count())
    each = next(each for each in drawn if each.attended is not None and each.rotations is not None)
    passages, rows, attended, rotations = Passages(instructions, unaided), each.rows, each.attended, each.rotations
    assert attended is not None
    assert rotations is not None
    for name, wrong in (
        ("rows", (rows.half(), attended, rotations)),
        ("rows", (rows[:, 1:], attended, rotations)),
        ("rows", (rows.repeat(1, 2)[:, ::2], attended, rotations)),
        ("attended", (rows, attended[1:], rotations)),
        ("rotations", (rows, attended, None)),
        ("rotations", (rows, attended, rotations.double())),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected contiguous"):
            passages.run(each.passage, *wrong)


@each_instructions
def test_no_rows_are_no_work(instructions: str) -> None:
    each = random_passage(Random(1), (3,), dtype=BFLOAT)
    for found, expected in zip(each.outcome(Passages(instructions, unaided), slice(0, 0)), each.expected, strict=True):
        assert found.shape == (0, expected.shape[1])
