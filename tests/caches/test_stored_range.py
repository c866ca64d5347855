"""What a cache's dtype cannot hold is refused, rather than stored as infinity."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from conftest import Server

from attnserve import AsyncClient, Cache, Client, InvalidRequestError, _dtypes
from attnserve_server.caches.shape import CacheDtype
from attnserve_server.caches.stored_range import FEW_BYTES, check_few, check_many
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.tensors import TensorSpec

STORED: Final[dict[CacheDtype, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
SENT: Final = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
MANY: Final = FEW_BYTES // 8 + 1
"""So many tokens of one float32 each, with values as wide, are looked at where they are written."""


def filled(element: float, tokens: int = 1, dtype: Any = np.float32) -> Any:
    """Keys or values of one head, of which the last element may be anything."""
    array = np.ones((1, tokens, 4), dtype)
    array[0, -1, 3] = element
    return array


def becomes_infinite(element: Any, stored: CacheDtype) -> bool:
    """Whether a number that is finite does not stay so where it is rounded once."""
    if stored == "bfloat16" and element.dtype == np.float64:  # ml_dtypes would round to float32 first
        return bool(np.isfinite(element) and abs(element) >= 2.0**128 - 2.0**119)
    return bool(np.isfinite(element) and np.isinf(np.asarray(element).astype(STORED[stored])))


def checked(key: Any, value: Any, dtype: CacheDtype) -> None:
    payloads = [memoryview(each.tobytes()) for each in (key, value)]
    specs = [
        TensorSpec(place, _dtypes.WIRE[each.dtype], each.shape) for place, each in enumerate((key, value)) if each.size
    ]
    tensors = dict(zip(("key", "value"), specs, strict=True))
    check_few(tensors, payloads, dtype)
    check_many(tensors, payloads, dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("stored", STORED)
def test_what_is_refused_is_what_would_become_infinite(stored: CacheDtype, sent: Any) -> None:
    """At the edges: the largest numbers of all dtypes, those half a step above, and their neighbours."""
    largest = [float(ml_dtypes.finfo(dtype).max) for dtype in STORED.values()]
    edges = [*largest, 65520.0, (2 - 2.0**-24) * 2.0**127, (2 - 2.0**-8) * 2.0**127, 1e300, 7e4]
    numbers = np.array([near for edge in edges for near in (np.nextafter(edge, 0), edge, np.nextafter(edge, np.inf))])
    below = np.nextafter(numbers.astype(np.float32), np.float32(0))
    for element in (*numbers.astype(sent), *below.astype(sent)):
        for signed in (element, -element):
            for name, place in (("key", 0), ("value", 1)):
                arrays = [filled(1, dtype=sent), filled(1, dtype=sent)]
                arrays[place][0, 0, 0], arrays[place][0, 0, 1], arrays[place][0, 0, 2] = np.nan, np.inf, signed
                if becomes_infinite(signed, stored):
                    with pytest.raises(InvalidRequest, match=f"within the range of {stored}") as refused:
                        checked(*arrays, stored)
                    assert refused.value.field == name
                else:
                    checked(*arrays, stored)


@pytest.mark.parametrize("tokens", [1, 3, MANY])
@pytest.mark.parametrize(("dtype", "sent", "element"), [("float16", np.float32, 7e4), ("float32", np.float64, -1e300)])
def test_nothing_is_appended_beyond_the_range(
    client: Client, tokens: int, dtype: CacheDtype, sent: Any, element: float
) -> None:
    """By an append and by attention that appends; NaN and infinities are stored as they come."""
    query, good, bad = filled(1, dtype=sent), filled(1, tokens, sent), filled(element, tokens, sent)
    with client.create_cache(1, 4, dtype=dtype) as cache:
        cache.append(good, good)
        for name, tensors in (("key", (bad, good)), ("value", (good, bad)), ("key", (bad, bad))):
            said = f"{name}: expected elements within the range of {dtype}, .*, found one of {element:.4g}".replace(
                "+", r"\+"
            )
            for call in (lambda pair: cache.append(*pair), lambda pair: cache.attend(query, *pair, causal=True)):
                with pytest.raises(InvalidRequestError, match=said) as refused:
                    call(tensors)
                assert isinstance(refused.value, ValueError)
                assert refused.value.field == name
        assert (cache.length, cache.refresh().lengths) == (tokens, (tokens,))
        assert np.isfinite(cache.attend(query).output).all()
        assert cache.append(good, filled(np.inf, tokens, sent)) == 2 * tokens
        result = cache.attend(query, good, filled(np.nan, tokens, sent), causal=True)
        assert result.cache_lengths == (3 * tokens,)
        assert np.isnan(result.output).any()


def test_a_dtype_of_the_same_range_takes_all(client: Client) -> None:
    most = float(np.finfo(np.float32).max)
    with client.create_cache(1, 4, dtype="float32") as cache:
        cache.append(filled(most), filled(most))
        cache.append(filled(6e4, dtype=np.float16), filled(6e4, dtype=np.float16))
        assert cache.length == 2
    with client.create_cache(1, 4, dtype="bfloat16") as cache:
        cache.append(filled(3e38), filled(3e38))
        with pytest.raises(InvalidRequestError, match="range of bfloat16"):
            cache.append(filled(most), filled(1))


@pytest.mark.parametrize("tokens", [1, MANY])
def test_of_several_caches_none_is_appended_to(client: Client, tokens: int) -> None:
    caches = [client.create_cache(1, 4, dtype="float16") for _ in range(3)]
    query, good = np.ones((3, 1, 1, 4), np.float32), np.ones((3, 1, tokens, 4), np.float32)
    bad = good.copy()
    bad[2, 0, -1, 0] = 1e5
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="value: expected elements within the range of float16"):
            client.attend(query, good, bad, caches=caches, causal=True)
        assert client.attend(query, good, good, caches=caches, causal=True).output.max() == 1
    assert [cache.refresh().lengths for cache in caches] == [(2 * tokens,)] * 3
    client.caches.delete(caches)


@pytest.mark.parametrize("tokens", [1, MANY])
def test_others_of_its_batch_are_not_affected(server: Server, tokens: int) -> None:
    good, bad = filled(1, tokens), filled(1e5, tokens)

    def appended(caches: Sequence[Cache], one: Client) -> list[Any]:
        futures = [
            one.submit(filled(1), good, bad if place % 3 == 1 else good, caches=cache, causal=True)
            for place, cache in enumerate(caches)
        ]
        return [future.exception() for future in futures]

    with Client(server.address) as client, ThreadPoolExecutor() as pool:
        sets = [[client.create_cache(1, 4, dtype="float16") for _ in range(6)] for _ in range(2)]
        for caches, errors in zip(sets, pool.map(lambda each: appended(each, client), sets), strict=True):
            for place, (cache, error) in enumerate(zip(caches, errors, strict=True)):
                assert isinstance(error, InvalidRequestError) if place % 3 == 1 else error is None
                assert cache.refresh().lengths == ((0,) if place % 3 == 1 else (tokens,))
            client.caches.delete(caches)


async def test_asyncio(server: Server) -> None:
    async with AsyncClient(server.address) as client, client.create_cache(1, 4, dtype="float16") as cache:
        with pytest.raises(InvalidRequestError, match="key: expected elements within the range of float16"):
            await cache.append(filled(7e4), filled(1))
        assert await cache.append(filled(6e4), filled(1)) == 1


def test_no_tokens_have_no_elements_beyond_any_range(client: Client) -> None:
    """They are appended as ever, alone and with an attention."""
    with client.create_cache(1, 4, dtype="float16") as cache:
        nothing, one = np.ones((1, 0, 4), np.float32), np.ones((1, 1, 4), np.float32)
        assert cache.append(nothing, nothing) == 0
        assert cache.append(one, one) == 1
        assert cache.attend(one, key=nothing, value=nothing).output.shape == (1, 1, 4)
        assert cache.length == 1
