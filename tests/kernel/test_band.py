"""Causal masks and windows as bands: every small one, against a key-by-key count of what each query reaches."""

from __future__ import annotations

from itertools import product

import torch

from attnserve_server.kernels.band import Band
from attnserve_server.requests.options import causal_window
from attnserve_server.requests.positions import keys_within_reach, pairs_within_reach

SMALL = [
    Band(query_length, kv_length, offset, left, right)
    for query_length, kv_length in product(range(1, 4), range(5))
    for offset, left, right in product(range(-4, 6), range(-1, 4), range(-1, 4))
]


def reached(band: Band) -> list[set[int]]:
    """The keys that each query reaches."""
    return [
        {
            key
            for key in range(band.kv_length)
            if (band.left < 0 or key >= band.offset + query - band.left)
            and (band.right < 0 or key <= band.offset + query + band.right)
        }
        for query in range(band.query_length)
    ]


def test_a_causal_mask_bounds_a_window_at_the_right() -> None:
    assert causal_window(True, (-1, -1)) == (-1, 0)
    assert causal_window(True, (1, 2)) == (1, 0)
    assert causal_window(False, (1, 2)) == (1, 2)


def test_what_each_query_reaches() -> None:
    for band in SMALL:
        for query, keys in enumerate(reached(band)):
            assert set(range(band.begin(query), band.end(query))) == keys, (band, query)


def test_what_all_of_them_reach() -> None:
    for band in SMALL:
        rows = reached(band)
        keys = set().union(*rows)
        if band.kv_length:
            assert band.is_everything == all(len(row) == band.kv_length for row in rows), band
        assert band.reach() == ((min(keys), max(keys) + 1) if keys else (0, 0)), band
        if band.offset == band.right == 0 and band.kv_length >= band.query_length:
            assert band.is_lower_triangle == (rows == [{*range(query + 1)} for query in range(band.query_length)]), band
        else:
            assert not band.is_lower_triangle or band.offset == band.right == 0, band


def test_how_much_they_reach_is_counted_without_looking_at_each() -> None:
    for band in SMALL:
        numbers = band.query_length, band.kv_length, band.offset, band.left, band.right
        begin, end = band.reach()
        assert pairs_within_reach(*numbers) == sum(map(len, reached(band))), band
        assert keys_within_reach(*numbers) == end - begin, band


def test_the_same_band_over_fewer_keys_and_of_fewer_queries() -> None:
    for band in SMALL:
        narrowed, begin, end = band.narrowed()
        assert (begin, end) == band.reach()
        assert [{key + begin for key in row} for row in reached(narrowed)] == reached(band), band
        for start in range(band.query_length):
            some = band.queries(start, band.query_length)
            assert reached(some) == reached(band)[start:], (band, start)


def test_the_same_band_counted_from_the_last_query_and_the_last_key() -> None:
    for band in SMALL:
        narrowed, _, _ = band.narrowed()
        found = narrowed.from_bottom_right()
        if found is not None:
            corner = narrowed.kv_length - narrowed.query_length
            assert reached(Band(narrowed.query_length, narrowed.kv_length, corner, *found)) == reached(narrowed), band
            assert -1 <= min(found) <= max(found) < max(1, narrowed.kv_length), band
    assert Band(2, 4, 2, -1, 0).from_bottom_right() == (-1, 0)
    assert Band(3, 3, 0, 1, 2).from_bottom_right() == (1, 2)
    assert Band(1, 4, 1, 1, 2).from_bottom_right() == (3, 0), "the same keys, from further to the right"
    assert Band(1, 3, 1, 1, 1).from_bottom_right() == (2, 0)
    assert Band(3, 2, -1, -1, 0).from_bottom_right() == (-1, 0), "more queries than keys"
    assert Band(2, 3, 0, 0, 0).from_bottom_right() is None


def test_as_a_mask() -> None:
    for band in SMALL[::7]:
        mask = band.tensor(torch.device("cpu"))
        assert mask.shape == (band.query_length, band.kv_length)
        assert [{*row.nonzero().flatten().tolist()} for row in mask] == reached(band), band


def test_as_the_edges_of_each_query() -> None:
    for band in SMALL:
        edges = zip(*(edge.tolist() for edge in band.edges(torch.device("cpu"))), strict=True)
        assert [{*range(begin, end)} for begin, end in edges] == reached(band), band
