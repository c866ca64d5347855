"""The examples run as users run them, and handle failures as they claim."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import Server

from attnserve import AsyncCache, AsyncClient, NotFoundError, UnavailableError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_S = 120.0
USER = 7


@pytest.fixture
def rank_items(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("rank_items")


def test_items_are_ranked_for_users_whose_histories_stay_in_the_service(server: Server) -> None:
    flags = ("--users", "20", "--requests", "3", "--timeout", str(PATIENCE_S))
    command = [sys.executable, str(EXAMPLES / "rank_items.py"), "--address", server.address, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.replace("versus NumPy", "difference").splitlines())
    assert lines["rankings"].startswith("60 of 50 candidates")
    assert lines["by"].split() == ["popularity", "none"]
    assert "too" not in lines


def test_a_load_that_outruns_its_timeout_is_told_as_such(server: Server) -> None:
    flags = ("--users", "3", "--requests", "2", "--timeout", "0")
    command = [sys.executable, str(EXAMPLES / "rank_items.py"), "--address", server.address, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by popularity    6 TimeoutError\n" in done.stdout
    assert "too late         6 of 6 rankings were given up after 0 s: more is asked\n" in done.stdout


def test_a_service_that_is_not_there_is_told_in_a_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # has a port, and does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        command = [sys.executable, str(EXAMPLES / "rank_items.py"), "--address", address, "--users", "1"]
        done = subprocess.run(
            [*command, "--requests", "1"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("rank_items: UNAVAILABLE: "), done.stderr
    assert done.stderr.count("\n") == 1


async def test_nothing_is_ranked_where_no_service_is(rank_items: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ranking would wait, in vain, for as long as it may take."""

    async def rank(*arguments: object) -> None:
        raise AssertionError("nobody is there to rank for")

    monkeypatch.setattr(rank_items.Ranking, "rank", rank)
    options = Namespace(users=1, requests=1, candidates=1, timeout=PATIENCE_S)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # has a port, and does not listen
        with pytest.raises(UnavailableError):
            await rank_items.demonstrate(options, f"127.0.0.1:{closed.getsockname()[1]}")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--address", "8001"), "argument --address: expected host:port, unix:/path or dns:///name:port, found '8001'"),
        (("--users", "0"), "argument --users: expected a number of at least 1, found '0'"),
        (("--requests", "-1"), "argument --requests: expected a number of at least 1, found '-1'"),
        (("--candidates", "many"), "argument --candidates: expected a number of at least 1, found 'many'"),
    ],
)
def test_arguments_that_make_no_sense_are_told_in_a_line(flags: tuple[str, str], expected: str) -> None:
    command = [sys.executable, str(EXAMPLES / "rank_items.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"rank_items.py: error: {expected}"), done.stderr


async def test_a_ranking_finds_what_was_lost_and_what_was_added(server: Server, rank_items: ModuleType) -> None:
    embeddings = np.random.default_rng(0).standard_normal((500, rank_items.HEADS, rank_items.WIDTH), np.float32)
    candidates = [1, 4, 9, 16, 25]

    async def check() -> None:
        expected = rank_items.computed_here(embeddings, ranking.histories[USER], candidates)
        np.testing.assert_allclose(await ranking.scores(USER, candidates), expected, atol=1e-4)
        assert (await ranking.rank(USER, candidates))[0] == candidates[expected.argmax()]

    async with AsyncClient(server.address) as client:
        ranking = rank_items.Ranking(client, embeddings, timeout=PATIENCE_S)
        ranking.looked_at(USER, range(100))
        await check()
        ranking.looked_at(USER, [42])
        await check()
        first = ranking._caches[USER]
        await client.caches.delete(first.name)  # as when its lease ends, or its server restarts
        await check()
        second = ranking._caches[USER]
        assert second is not first
        assert await ranking._recovered(USER, first, NotFoundError("as to another ranking that used it"))
        assert ranking._caches[USER] is second
        # An append that the client gave up on but the server carried out: the cache object here is unaware of it.
        ranking.looked_at(USER, [77])
        same = await client.open_cache(second.name)
        await same.append(embeddings[[77]], embeddings[[77]], layout="length_first")
        await check()
        assert ranking._caches[USER] is second
        assert not ranking.failures
        await ranking.close()
        assert second.name not in [cache.name for cache in await client.caches.list()]


async def test_a_ranking_that_is_given_up_loses_no_cache_that_makes_room_for_it(
    start_server: Callable[..., Server], rank_items: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("--cache-bytes", "1MiB", "--cache-page-bytes", "64KiB")
    embeddings = np.zeros((10, rank_items.HEADS, rank_items.WIDTH), np.float32)
    asked = asyncio.Event()

    async def without_an_answer(cache: AsyncCache) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with AsyncClient(server.address) as client:
        ranking = rank_items.Ranking(client, embeddings, timeout=PATIENCE_S)
        for user, items in ((USER, 500), (USER + 1, 800)):
            ranking.looked_at(user, [3] * items)
        await ranking.scores(USER, [1])
        with monkeypatch.context() as patches:
            patches.setattr(AsyncCache, "delete", without_an_answer)
            given_up = asyncio.create_task(ranking.scores(USER + 1, [1]))
            await asyncio.wait_for(asked.wait(), PATIENCE_S)
            given_up.cancel()
            await asyncio.wait([given_up])
        await ranking.scores(USER + 1, [1])
        assert ranking.resident == 1
        await ranking.close()
        assert not await client.caches.list()


async def test_what_cannot_be_computed_is_ranked_by_popularity(server: Server, rank_items: ModuleType) -> None:
    embeddings = np.zeros((10, rank_items.HEADS, rank_items.WIDTH), np.float32)
    async with AsyncClient(server.address) as client:
        ranking = rank_items.Ranking(client, embeddings, timeout=0.0)
        ranking.looked_at(USER, [3, 3, 5])
        assert await ranking.rank(USER, [1, 5, 3]) == [3, 5, 1]
        assert sum(ranking.failures.values()) == 1
