"""The SDK's caches against a real server: what its documentation shows, from both clients."""

from __future__ import annotations

from typing import Any

import accuracy
import calls
import numpy as np
import oracle
import pytest
from caller import tokens
from cases import Case
from conftest import Server

from attnserve import AsyncClient, Client, FailedPreconditionError, InvalidRequestError, NotFoundError
from attnserve_server.native import library


def test_prefill_decode_fork_and_truncate(client: Client) -> None:
    key, value = tokens(0, 40)
    query = np.random.default_rng(1).standard_normal((2, 1, 8)).astype(np.float32)
    with client.create_cache(num_kv_heads=2, head_dim=8, layers=2, dtype="float32", ttl=600) as cache:
        assert cache.append(key, value) == 40
        accuracy.check(Case(query, key, value), cache.attend(query))
        step = tokens(1, 1)
        key, value = (np.concatenate(each, axis=1) for each in zip((key, value), step, strict=True))
        accuracy.check(Case(query, key, value), cache.attend(query, key=step[0], value=step[1], causal=True))
        branch = cache.fork()
        assert cache.length == branch.length == 41
        branch.append(*tokens(2, 3))
        cache.truncate(12)
        accuracy.check(Case(query, key[:, :12], value[:, :12]), cache.attend(query))
        own = [np.concatenate(each, axis=1) for each in zip((key, value), tokens(2, 3), strict=True)]
        accuracy.check(Case(query, *own), branch.attend(query))
        cache.append(*tokens(3, 5), layer=1)
        accuracy.check(Case(query, *tokens(3, 5)), cache.attend(query, layer=1))
        assert cache.info().lengths == (12, 5)
        assert cache.bytes > 0
        pair = np.stack([query, query])
        both = client.attend(pair, caches=[cache, branch])
        np.testing.assert_array_equal(both.output[0], cache.attend(query).output)
        np.testing.assert_array_equal(both.output[1], branch.attend(query).output)
        with pytest.raises(InvalidRequestError):
            cache.truncate(13)
    with pytest.raises(NotFoundError):
        cache.attend(query)
    assert branch.name in {each.name for each in client.caches.list()}
    branch.delete()


async def test_a_printed_cache_says_what_it_is_and_not_its_whole_name(client: Client, server: Server) -> None:
    with client.create_cache(num_kv_heads=2, head_dim=8, ttl=60) as cache:
        cache.append(*tokens(0, 4))
        async with AsyncClient(server.address) as other:
            described = [repr(cache), repr(await other.open_cache(cache.name))]
        described += [repr(cache.info()), repr(client.caches.list()), repr(client.caches.pool())]
        for text, kind in zip(described, ("Cache", "AsyncCache", "CacheInfo", "CacheInfo", "CacheInfo"), strict=True):
            assert f"{kind}(" in text
            assert f"{cache.name[:4]}…'" in text
            assert cache.name[:6] not in text
        assert "num_kv_heads=2, head_dim=8, value_dim=8, layers=1, dtype='float32', length=4" in described[0]
        with Client(server.address) as stranger, pytest.raises(InvalidRequestError, match="of this client") as caught:
            stranger.attend(tokens(0, 1)[0], caches=cache)
        assert cache.name[:6] not in str(caught.value)


@pytest.mark.parametrize("options", [{"window": (2, 2)}, {"alibi_slopes": np.array([0.5, 0.25], np.float32)}])
def test_positions_count_from_the_end_without_causal_too(client: Client, options: dict[str, Any]) -> None:
    """Of each cache, or of the keys in it that count; an offset of 0 is what requests with keys have."""
    query, key, value = np.random.default_rng(5).standard_normal((3, 2, 2, 9, 8)).astype(np.float32)
    query, lengths = query[:, :, :2], np.array([9, 6])
    caches = [client.create_cache(2, 8) for _ in lengths]
    for cache, length, own_key, own_value in zip(caches, lengths, key, value, strict=True):
        cache.append(own_key[:, :length], own_value[:, :length])

    def check(found: Any, kept: Any, **positions: Any) -> None:
        expected = oracle.attend(query, key, value, kv_lengths=kept, **positions, **options).output
        np.testing.assert_allclose(found.output, expected, rtol=0, atol=2e-6)

    check(client.attend(query, caches=caches, **options), lengths, query_offset=lengths - 2)
    fewer = np.array([4, 6])
    check(client.attend(query, caches=caches, kv_lengths=fewer, **options), fewer, query_offset=fewer - 2)
    check(client.attend(query, caches=caches, query_offset=0, **options), lengths)
    check(client.attend(query, key, value, kv_lengths=lengths, **options), lengths)
    client.caches.delete([cache.name for cache in caches])


def test_errors_name_the_tensor_that_does_not_fit(client: Client) -> None:
    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    with client.create_cache(2, 8, value_dim=6) as cache:
        for tensors, field, expected in (
            ((zeros(1, 8),), "query.shape", "a multiple of the 2 heads of the caches, found 1 head"),
            ((zeros(2, 1, 7),), "query.shape", "width 8, as the keys of the caches have"),
            ((zeros(2, 1, 8), zeros(1, 1, 8), zeros(1, 1, 6)), "key.shape", "2 heads, as the caches have"),
            ((zeros(2, 1, 8), zeros(2, 1, 8), zeros(2, 1, 8)), "value.shape", "width 6, as the values of the caches"),
        ):
            with pytest.raises(InvalidRequestError, match=expected) as refused:
                cache.attend(*tensors)
            assert refused.value.field == field
        assert cache.refresh().lengths == (0,)


def test_somebody_else_appends(client: Client) -> None:
    """The SDK sends the length that it expects, and is told the actual one."""
    with client.create_cache(2, 8) as cache:
        cache.append(*tokens(0, 4))
        client.open_cache(cache.name).append(*tokens(1, 2))
        with pytest.raises(FailedPreconditionError) as caught:
            cache.append(*tokens(2, 1))
        assert caught.value.actual_length == 6
        cache.refresh()
        assert cache.append(*tokens(2, 1)) == 7


def test_the_caller_may_say_which_length_it_expects(client: Client) -> None:
    with client.create_cache(2, 8) as cache:
        other = client.open_cache(cache.name)
        assert cache.append(*tokens(0, 4), expected_length=0) == 4
        for handle in (cache, other):
            with pytest.raises(FailedPreconditionError, match=r"^the cache has 4 tokens, not 0; ") as caught:
                handle.append(*tokens(0, 4), expected_length=0)
            assert caught.value.actual_length == 4
        assert other.append(*tokens(1, 2), expected_length=4) == other.length == 6
        assert cache.info().lengths == (6,)


def test_a_reader_follows_what_another_appends(client: Client, server: Server) -> None:
    """Until it changes the cache itself: then it expects the length that it knows, for reading too."""
    query = np.random.default_rng(1).standard_normal((2, 1, 8)).astype(np.float32)
    with client.create_cache(2, 8) as cache, Client(server.address) as elsewhere:
        cache.append(*tokens(0, 4))
        reader, writer = (elsewhere.open_cache(cache.name) for _ in range(2))
        for seed in range(1, 4):
            cache.append(*tokens(seed, 2))
            seen = reader.attend(query)
            np.testing.assert_array_equal(seen.output, cache.attend(query).output)
            assert reader.length == cache.length == 4 + 2 * seed
        with client.create_cache(2, 8) as own:
            own.append(*tokens(9, 3))
            both = client.attend(np.stack([query, query]), caches=[own, client.open_cache(cache.name)])
            assert both.cache_lengths == (3, 10)
        for ask in (lambda: writer.append(*tokens(5, 1)), lambda: writer.attend(query)):
            with pytest.raises(FailedPreconditionError, match=r"^the cache has 10 tokens, not 4; "):
                ask()
        writer.refresh()
        assert writer.append(*tokens(5, 1)) == 11
        assert reader.attend(query).cache_lengths == (11,)
        cache.refresh()
        cache.truncate(2)
        assert reader.attend(query).cache_lengths == (2,)
        with pytest.raises(FailedPreconditionError, match=r"^the cache has 2 tokens, not 11; "):
            writer.truncate(1)


async def test_a_reader_in_tasks_follows_too(client: Client, server: Server) -> None:
    query = np.random.default_rng(1).standard_normal((2, 1, 8)).astype(np.float32)
    with client.create_cache(2, 8) as cache:
        async with AsyncClient(server.address) as elsewhere:
            readers = [
                await elsewhere.open_cache(cache.name),
                await elsewhere.open_cache(cache.name, address=server.address),
            ]
            cache.append(*tokens(0, 4))
            for reader in readers:
                assert (await reader.attend(query)).cache_lengths == (4,)


def test_which_of_several_caches_is_not_as_expected(client: Client) -> None:
    """Errors of a call with several caches name the one at fault, so that its sequence alone is restored."""
    caches = [client.create_cache(2, 8) for _ in range(4)]
    query, key, value = np.random.default_rng(1).standard_normal((3, 4, 2, 1, 8)).astype(np.float32)
    client.open_cache(caches[2].name).append(*tokens(1, 3))
    for step in ((query, key, value), (query,)):
        with pytest.raises(FailedPreconditionError, match=r"^caches\[2\] has 3 tokens, not 0; ") as differs:
            client.attend(*step, caches=caches)
        assert (differs.value.name, differs.value.actual_length) == (caches[2].name, 3)
    with pytest.raises(FailedPreconditionError, match=r"^the cache has 3 tokens, not 0; ") as differs:
        caches[2].truncate(0)
    assert differs.value.name == caches[2].name
    next(cache for cache in caches if cache.name == differs.value.name).refresh()
    assert client.attend(query, key, value, caches=caches).cache_lengths == (1, 1, 4, 1)
    client.caches.delete(caches[1].name)
    with pytest.raises(NotFoundError) as lost:
        client.attend(query, key, value, caches=caches)
    assert lost.value.name == caches[1].name
    client.caches.delete([cache.name for cache in caches])


def test_many_appends_in_flight_stay_in_order(client: Client) -> None:
    """Steps submitted without waiting for each other."""
    query = np.random.default_rng(1).standard_normal((2, 1, 8)).astype(np.float32)
    with client.create_cache(2, 8) as cache:
        steps = [tokens(n, 1) for n in range(30)]
        futures = [client.submit(query, *step, caches=cache, causal=True) for step in steps]
        for n, future in enumerate(futures, 1):
            key, value = (np.concatenate(each, axis=1) for each in zip(*steps[:n], strict=True))
            accuracy.check(Case(query, key, value), future.result())
        assert cache.length == 30


async def test_asyncio(server: Server) -> None:
    query = np.random.default_rng(1).standard_normal((2, 1, 8)).astype(np.float32)
    async with AsyncClient(server.address) as client, await client.create_cache(2, 8) as cache:
        await cache.append(*tokens(0, 9))
        async with await cache.fork() as branch:
            accuracy.check(Case(query, *tokens(0, 9)), await branch.attend(query))
        pool = await client.caches.pool()
        assert cache.name in {each.name for each in pool.caches}
        assert branch.name not in {each.name for each in pool.caches}


def test_one_cache_that_is_not_finite_costs_the_others_of_a_message_nothing(client: Client, server: Server) -> None:
    """Only that one is recomputed, by other kernels; all have the bits that they have alone."""
    if not library.available():
        pytest.skip("no native kernel is here")

    def native_calls() -> float:
        return calls.metric(server.http_address, "attnserve_kernel_calls_total", kernel=library.NAME)

    caches = [client.create_cache(2, 8) for _ in range(6)]
    for n, cache in enumerate(caches):
        cache.append(*tokens(n, 20 + n))
    query, key, value = np.random.default_rng(1).standard_normal((3, 6, 2, 1, 8)).astype(np.float32)
    value[3, 1, 0, 2] = np.nan
    forks = [cache.fork() for cache in caches]
    caches[0].attend(query[0])
    before = native_calls()
    together = client.attend(query, key, value, caches=caches, causal=True, return_lse=True)
    assert native_calls() - before < 6 + 6, "those that are finite are not computed again"
    for n, fork in enumerate(forks):
        alone = fork.attend(query[n], key[n], value[n], causal=True, return_lse=True)
        np.testing.assert_array_equal(together.output[n], alone.output)
        assert together.lse is not None
        np.testing.assert_array_equal(together.lse[n], alone.lse)
        assert np.isnan(together.output[n]).any() == (n == 3)
    client.caches.delete([cache.name for cache in (*caches, *forks)])
