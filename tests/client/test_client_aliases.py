"""Caches that several clients find by an alias: the same one, on the same server, whatever happens to replies."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cache_keeper import Keeper
from cached import KEYS, QUERY, D, H, address, client, keeper, part, reference, transport
from calls import PATIENCE_S

from attnserve import AsyncClient, Client, DeadlineExceededError, FailedPreconditionError, InvalidRequestError
from attnserve._commands import cli

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Server

__all__ = ["address", "client", "keeper", "transport"]


async def test_another_client_finds_the_cache_with_what_is_in_it(server: Server) -> None:
    with Client(server.address) as mine:
        async with AsyncClient(server.address) as yours:
            kept = mine.create_cache(H, D, alias="user:1")
            kept.append(*part(0, 3))
            found = await yours.create_cache(H, D, alias="user:1")
            assert kept.alias == "user:1"
            assert (found.name, found.alias, found.length) == (kept.name, "user:1", 3)
            kept.append(*part(3, 5))
            with pytest.raises(FailedPreconditionError) as caught:
                await found.append(*part(3, 5))
            assert caught.value.actual_length == 5, "two that fill a cache do not both succeed"
            read = await yours.create_cache(H, D, alias="user:1")
            kept.append(*part(5, 6))
            result = await read.attend(QUERY)  # which is read at whatever length it has by then
            np.testing.assert_allclose(result.output, reference(6), atol=1e-6)
            known = (read := await yours.create_cache(H, D, alias="user:1")).length
            kept.append(*part(6, 7))
            assert (await read.attend(QUERY)).cache_lengths == (known + 1,) == (read.length,)
            with pytest.raises(FailedPreconditionError):  # what was lacking then is not appended to what is there now
                await read.append(*part(known, 8), expected_length=known)
            assert await read.append(*part(7, 8), expected_length=read.length) == 8
            assert {info.alias for info in mine.caches.list()} >= {"user:1"}
            assert mine.create_cache(H, D).alias is None
            await found.delete()
            assert mine.create_cache(H, D, alias="user:1").name != kept.name


def test_a_cache_with_an_alias_is_never_given_up(client: Any, keeper: Keeper) -> None:
    """Others may have found it meanwhile, and whoever asks again does."""
    released = threading.Event()
    keeper.after["Create"] = lambda answer, context: released.wait(PATIENCE_S)
    with pytest.raises(DeadlineExceededError):
        client.create_cache(H, D, alias="it", timeout=0.5)
    released.set()
    keeper.lose = ["Create"]
    cache = client.create_cache(H, D, alias="it")
    assert (cache.name, cache.append(*part(0, 2))) == ("cache-0", 2)
    assert (keeper.methods(), list(keeper.caches)) == (["Create"] * 3 + ["Append"], ["cache-0"])


@pytest.mark.parametrize(
    ("alias", "said"),
    [("", "a string that is not empty"), (7, "a string that is not empty"), ("\ud800", "what UTF-8 can say")],
)
def test_a_wrong_alias_is_said_to_be_that(client: Any, keeper: Keeper, alias: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"alias: expected {said}") as caught:
        client.create_cache(H, D, alias=alias)
    assert (caught.value.field, keeper.methods()) == ("alias", [])


async def test_an_alias_decides_which_of_several_servers_has_its_cache(start_server: Callable[..., Server]) -> None:
    """Whichever client asks, in whatever order it knows the servers; and those of each stay when another one leaves."""
    addresses = [start_server("--device", "cpu").address for _ in range(3)]
    aliases = [f"user:{number}" for number in range(60)]
    with Client(addresses) as one:
        homes = {alias: one.create_cache(H, D, alias=alias).address for alias in aliases}
    assert min(Counter(homes.values()).values()) >= 8, "of 20 each on average"
    async with AsyncClient(addresses[::-1]) as another:
        assert {alias: (await another.create_cache(H, D, alias=alias)).address for alias in aliases} == homes
        assert len(await another.caches.list()) == len(aliases)
        names = [info.name for info in await another.caches.list() if info.alias in aliases[:2]]
        assert await another.caches.delete(aliases[0]) == 0, "an alias is not a name"
        assert await another.caches.delete(["nobody", *names, *names, await another.open_cache(names[0])]) == 2
        assert len(await another.caches.list()) == len(aliases) - 2
    for left_out in addresses:
        with Client([each for each in addresses if each != left_out]) as one:
            for alias in itertools.islice((alias for alias in aliases if homes[alias] != left_out), 10):
                assert one.create_cache(H, D, alias=alias).address == homes[alias]


def test_aliases_are_listed_in_a_shell(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(server.address) as made:
        made.create_cache(H, D, alias="user:7").append(KEYS[:, :, :1], KEYS[:, :, :1])
        made.create_cache(H, D, alias="\x1b[2J")
        assert cli.main(["caches", server.address]) == 0
        listed = capsys.readouterr().out
        made.caches.delete([info.name for info in made.caches.list() if info.alias is not None])
    assert "user:7" in listed
    assert "\\x1b[2J" in listed
    assert "\x1b" not in listed, "a terminal would obey it"
