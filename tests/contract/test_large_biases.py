"""Biases, and those of ALiBi, that are large for every key that matters: what is left of float32 must suffice.

That is so where nearer keys are hidden, and where slopes are negative, so that the farthest key counts most. Over
caches, parts are merged by their lses, which are then large, too. By every kernel on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
from conftest import Server

from attnserve import Client

BOUND = 2e-6
SLOPES = (2.0 ** -np.arange(1, 9)).astype(np.float32)
LOWEST = np.finfo(np.float32).min


@pytest.fixture(scope="module", params=["auto", "off"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a server with the native kernel, and of one with torch's only; pages are short."""
    flags = ("--native-kernel", request.param, "--cache-page-bytes", "16KiB", "--cache-bytes", "128MiB")
    server = Server(flags, tmp_path_factory.mktemp("server") / "stderr")
    with Client(server.address) as client:
        yield client
    assert server.stop() == 0, server.stderr()


def tensors(queries: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """query, key and value of 8 heads of 64, unit-normal."""
    rng = np.random.default_rng(keys)
    query, key, value = (rng.standard_normal((8, n, 64)).astype(np.float32) for n in (queries, keys, keys))
    return query, key, value


def check(client: Client, queries: int, keys: int, **options: Any) -> None:
    """Against the oracle, with keys that are sent and with keys in a cache."""
    query, key, value = tensors(queries, keys)
    offset = options.pop("query_offset", keys - queries)
    expected = oracle.attend(query, key, value, query_offset=offset, **options)
    sent = client.attend(query, key, value, query_offset=offset, return_lse=True, **options)
    with client.create_cache(8, 64) as cache:
        for begin in range(0, keys, 3000):
            cache.append(key[:, begin : begin + 3000], value[:, begin : begin + 3000])
        resident = cache.attend(query, query_offset=offset, return_lse=True, **options)
        assert sent.lse is not None
        assert resident.lse is not None
        for result in (sent, resident):
            np.testing.assert_allclose(result.output, expected.output, rtol=0, atol=BOUND)
            np.testing.assert_allclose(result.lse, expected.lse, rtol=2e-7, atol=BOUND)
        if keys > 1000:  # in several parts, which are merged
            weights = cache.attend(query, query_offset=offset, return_scores="weights", **options)
            np.testing.assert_allclose(weights.scores, expected.weights, rtol=0, atol=BOUND)


@pytest.mark.parametrize("hidden", [-np.inf, LOWEST, -1e5])
@pytest.mark.parametrize("queries", [100, 1])
def test_near_keys_hidden_by_a_bias(client: Client, queries: int, hidden: float) -> None:
    bias = np.where(np.arange(512) < 256, 0, hidden).astype(np.float32)
    check(client, queries, 512, bias=bias, alibi_slopes=SLOPES)


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (100, 50)}])
@pytest.mark.parametrize("queries", [100, 1])
def test_negative_slopes(client: Client, queries: int, options: dict[str, Any]) -> None:
    check(client, queries, 512, alibi_slopes=-SLOPES, **options)


def test_slopes_of_both_signs_far_away(client: Client) -> None:
    signs = np.where(np.arange(8) % 2, 1, -1).astype(np.float32)
    for offset in (-5000, 20_000):
        check(client, 3, 300, alibi_slopes=signs * SLOPES, query_offset=offset)


@pytest.mark.parametrize("slopes", [SLOPES, -SLOPES])
@pytest.mark.parametrize("offset", [8999, 100_000])
def test_distant_keys_in_two_parts_of_a_cache(client: Client, slopes: Any, offset: int) -> None:
    """The parts are of 32 MiB: a boundary lies between the two keys that are attended to."""
    mask = np.zeros(9000, bool)
    mask[[8100, 8300]] = True
    check(client, 1, 9000, mask=mask, alibi_slopes=slopes, query_offset=offset)
