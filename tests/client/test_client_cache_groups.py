"""Several caches in one request: forked or truncated, all or none, also where a reply is lost; and deleted."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from cache_keeper import Keeper, Refusal
from cached import QUERY, D, H, Transport, address, client, keeper, normal, part, reference, transport
from calls import PATIENCE_S, until
from conftest import Server

from attnserve import (
    AsyncClient,
    AttnServeError,
    Client,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)

__all__ = ["address", "client", "keeper", "transport"]


def of_lengths(client: Any, *lengths: int) -> list[Any]:
    """Caches with as many tokens, the first ones of all that there are."""
    caches = [client.create_cache(H, D) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        cache.append(*part(0, length))
    return caches


def test_beams_go_on(client: Any, keeper: Keeper) -> None:
    """A cache that is given several times is forked as often; each fork is a cache of its own."""
    first, second = of_lengths(client, 4, 6)
    keeper.asked.clear()
    forks = client.caches.fork([second, first, second], 60.0)
    assert keeper.methods() == ["Fork"]
    assert [(fork.length, fork.ttl) for fork in forks] == [(6, 60.0), (4, 60.0), (6, 60.0)]
    assert len({cache.name for cache in (first, second, *forks)}) == 5
    forks[0].append(*part(6, 9))
    for cache, length in ((forks[0], 9), (forks[1], 4), (forks[2], 6), (second, 6)):
        np.testing.assert_allclose(cache.attend(QUERY).output, reference(length), atol=1e-6)
    assert [fork.length for fork in client.caches.fork(first)] == [4]


def test_drafts_are_taken_back(client: Any, keeper: Keeper) -> None:
    """Each cache at a length of its own, or all at one."""
    caches = of_lengths(client, 4, 6, 8)
    keeper.asked.clear()
    client.caches.truncate(caches, [4, 5, 2])
    assert keeper.methods() == ["Truncate"]
    assert [cache.length for cache in caches] == [4, 5, 2]
    for cache in caches:
        np.testing.assert_allclose(cache.attend(QUERY).output, reference(cache.length), atol=1e-6)
    client.caches.truncate(caches, 1)
    assert [cache.append(*part(1, 3)) for cache in caches] == [3, 3, 3]
    client.caches.truncate(caches[0], [0])
    client.caches.truncate(caches[1:], np.array([1, 2]))
    assert [cache.length for cache in caches] == [0, 1, 2]
    client.caches.truncate(caches[1:], np.array(1))
    client.caches.truncate(caches[1:], (number for number in (1, 0)))
    assert [cache.length for cache in caches] == [0, 1, 0]


@pytest.mark.parametrize("losses", [1, 2])
def test_lost_replies(client: Any, keeper: Keeper, losses: int) -> None:
    caches = of_lengths(client, 4, 6)
    keeper.lose = ["Truncate"] * losses + ["Fork"] * losses
    client.caches.truncate(caches, [3, 2])
    assert [cache.length for cache in caches] == [3, 2]
    forks = client.caches.fork(caches)
    assert [fork.length for fork in forks] == [3, 2]
    assert len(keeper.caches) == 4
    assert [cache.append(*part(0, 1)) for cache in (*caches, *forks)] == [4, 3, 4, 3]


def test_all_or_none(client: Any, keeper: Keeper) -> None:
    """Somebody else has changed one: nothing known of any of them changes."""
    caches = of_lengths(client, 4, 6)
    key = normal(9, H, 1, D)
    keeper.caches[caches[1].name].append(0, key, key, append_id=1 << 63)
    with pytest.raises(FailedPreconditionError) as caught:
        client.caches.truncate(caches, [1, 1])
    assert caught.value.actual_length == 7
    assert [cache.length for cache in caches] == [4, 6]
    assert [keeper.caches[cache.name].layers[0][0].shape[1] for cache in caches] == [4, 7]
    caches[1].refresh()
    client.caches.truncate(caches, 1)
    del keeper.caches[caches[0].name]
    for ask in (lambda: client.caches.fork(caches), lambda: client.caches.truncate(caches, 0)):
        with pytest.raises(NotFoundError):
            ask()
    assert len(keeper.caches) == 1


def test_forks_that_nobody_gets_are_given_up(client: Any, keeper: Keeper) -> None:
    caches = of_lengths(client, 4, 6)

    keeper.lose = ["Fork"] * 10
    with pytest.raises(UnavailableError):
        client.caches.fork(caches)
    names = {cache.name for cache in caches}  # those of the list, since a loop tells the server only while it runs
    until(lambda: {info.name for info in client.caches.list()} == names, "what was made in vain is deleted")


def test_beams_are_dropped(client: Any, keeper: Keeper) -> None:
    """In one request, each once, whatever has been deleted already; with names that only others have."""
    caches = of_lengths(client, 1, 2, 3)
    caches[1].delete()
    keeper.asked.clear()
    client.caches.delete([caches[0], caches[1], caches[0]])
    assert [(method, list(request.names)) for method, request in keeper.asked] == [
        ("Delete", [caches[0].name, caches[1].name])
    ]
    assert list(keeper.caches) == [caches[2].name]
    with pytest.raises(NotFoundError):
        caches[0].attend(QUERY)
    others = of_lengths(client, 1, 1)
    client.caches.delete([others[0].name, others[1]])
    client.caches.delete(caches[2])
    assert not keeper.caches
    keeper.asked.clear()
    client.caches.delete([])
    client.caches.delete(iter(()))
    assert keeper.methods() == []


def test_caches_are_deleted_after_what_was_asked_before(address: str, keeper: Keeper, transport: Transport) -> None:
    """Also where one of them alone is still in use."""
    arrived, released = threading.Event(), threading.Event()

    def hold(request: Any) -> None:
        arrived.set()
        released.wait(PATIENCE_S)

    with Client(address, transport=transport) as client, ThreadPoolExecutor(1) as threads:
        caches = of_lengths(client, 1, 2)
        keeper.before["Attend"] = hold
        results = [client.submit(QUERY, *part(at, at + 1), caches=caches[1]) for at in (2, 3)]
        assert arrived.wait(PATIENCE_S)
        deleted = threads.submit(client.caches.delete, caches)
        released.set()
        for result, length in zip(results, (3, 4), strict=True):
            np.testing.assert_allclose(result.result().output, reference(length), atol=1e-6)
        deleted.result()
    assert keeper.methods()[-1] == "Delete"
    assert not keeper.caches


def test_what_cannot_be_asked_for(client: Any, address: str, keeper: Keeper) -> None:
    one, other = of_lengths(client, 2, 2)
    keeper.asked.clear()
    for ask, words in (
        (lambda: client.caches.fork([]), r"^caches: expected one at least, found none$"),
        (lambda: client.caches.fork([one, 3]), r"^caches: expected caches of this client, found 3$"),
        (lambda: client.caches.fork([one], 0), r"^ttl: expected seconds, more than 0"),
        (lambda: client.caches.truncate([], 1), r"^caches: expected one at least, found none$"),
        (lambda: client.caches.truncate([one, one], 1), r"^caches: expected each cache once, found one twice$"),
        (lambda: client.caches.truncate([one, other], [1]), r"^lengths: expected 2, one for each cache, found 1$"),
        (
            lambda: client.caches.truncate([one, other], [1, -1]),
            r"^lengths\[1\]: .* of 0 or more, found -1$",
        ),
        (lambda: client.caches.truncate([one, other], 1.5), r"^lengths: expected an integer, found 1\.5$"),
        (lambda: client.caches.truncate([one, other], "11"), r"^lengths\[0\]: expected an integer, found '1'$"),
        (lambda: client.caches.truncate([one, other], None), r"^lengths: expected an integer, found None$"),
        (lambda: client.caches.truncate([one, other], {1, 2}), r"^lengths: .* the order of the caches, found a set$"),
        (lambda: client.caches.truncate([one, other], {1: 2}), r"^lengths: .* the order of the caches, found a dict$"),
        (lambda: client.caches.delete(3), r"^caches: expected caches or their names, found 3$"),
        (lambda: client.caches.delete([one, None]), r"^caches: expected caches or their names, found None$"),
        (lambda: client.caches.delete([one, ""]), r"^caches: expected a string that is not empty, found ''$"),
        (lambda: client.caches.fork([one] * 257), r"^caches: expected at most 256, found 257$"),
    ):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            ask()
        assert caught.value.field == words[1:].partition(":")[0].replace("\\", "")
    with Client(address) as another:
        theirs = getattr(one, "target", one)
        for ask in (lambda: another.caches.truncate([theirs], 1), lambda: another.caches.delete(theirs)):
            with pytest.raises(InvalidRequestError, match="one of another client"):
                ask()
    assert keeper.methods() == []


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_each_server_is_asked_to_delete_what_it_has(kind: type[Client | AsyncClient]) -> None:
    """In portions, and whatever another answers. Of a client's own caches, no other server is told the names."""
    keepers = [Keeper(), Keeper()]
    with ExitStack() as stack:
        addresses = [stack.enter_context(keeper.serve()) for keeper in keepers]
        client: Any = kind(addresses, retries=0)
        one = [await done(client.create_cache(2, 8)) for _ in range(2)]
        one.sort(key=lambda cache: addresses.index(cache.address))
        assert [cache.address for cache in one] == addresses
        many = [cache for each in one for _ in range(3) for cache in await done(client.caches.fork([each] * 256))]

        def refuse(request: Any) -> None:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT)

        keepers[0].before["Delete"] = refuse
        with pytest.raises(InvalidRequestError):
            await done(client.caches.delete(many))
        del keepers[0].before["Delete"]
        assert [len(keeper.caches) for keeper in keepers] == [769, 1]
        for keeper in keepers:
            keeper.asked.clear()
        await done(client.caches.delete([*many, *one]))
        for keeper in keepers:
            assert [(method, len(request.names)) for method, request in keeper.asked] == [
                ("Delete", 500),
                ("Delete", 269),
            ]
            assert not keeper.caches
        await done(client.close())


async def done(result: Any) -> Any:
    """What either client returns, awaited if need be."""
    return await result if inspect.isawaitable(result) else result


class Asked(NamedTuple):
    """What is asked of two caches of a server, with 5 tokens and 2."""

    ask: Callable[[Any, list[Any]], object]
    error: type[AttnServeError]
    says: str
    """Begins with the field, if there is one."""


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "asked",
    [
        Asked(lambda client, caches: caches[0].truncate(6), InvalidRequestError, "length: "),
        Asked(lambda client, caches: client.caches.truncate(caches, [1, 9]), InvalidRequestError, "lengths[1]: "),
        Asked(lambda client, caches: client.caches.truncate(caches, 3), InvalidRequestError, "lengths: "),
        Asked(lambda client, caches: client.caches.fork(caches * 5), InvalidRequestError, "caches: expected at most 8"),
        Asked(
            lambda client, caches: client.caches.truncate(caches, [9, 9]), FailedPreconditionError, "caches[1] has 2 "
        ),
        Asked(lambda client, caches: caches[1].truncate(9), FailedPreconditionError, "the cache has 2 tokens, not 3"),
    ],
    ids=lambda asked: asked.says.partition(" ")[0] if isinstance(asked, Asked) else asked.__name__,
)
async def test_errors_name_what_the_caller_gave(small_server: Server, kind: type, asked: Asked) -> None:
    """And not what it is called on the wire."""
    client: Any = kind(small_server.address)
    caches = [await done(client.create_cache(H, D)) for _ in range(2)]
    for cache, length in zip(caches, (5, 2), strict=True):
        await done(cache.append(*part(0, length)))
    if asked.error is FailedPreconditionError:
        caches[0]._state.tokens[0], caches[1]._state.tokens[0] = 5, 3  # as if another writer had truncated it
    with pytest.raises(asked.error) as caught:
        await done(asked.ask(client, caches))
    assert str(caught.value).startswith(asked.says)
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.field == asked.says.partition(":")[0]
    else:
        assert isinstance(caught.value, FailedPreconditionError)
        assert caught.value.actual_length == 2
    await done(client.caches.delete(caches))
    await done(client.close())


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has few caches."""
    server = Server(("--device", "cpu", "--max-caches", "8"), tmp_path_factory.mktemp("small") / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()
