"""Caches of both clients, over both transports, against a peer that keeps them: what is sent, which lengths are known,
and that nothing is appended twice, whatever happens to replies.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from cache_keeper import Keeper, attention
from cached import KEYS, QUERY, VALUES, D, H, address, client, keeper, normal, part, reference, transport
from peers import good, peer

from attnserve import (
    AttnServeError,
    Cache,
    CacheInfo,
    Client,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
)
from attnserve._commands import cli
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

__all__ = ["address", "client", "keeper", "transport"]


def test_a_cache_from_its_beginning_to_its_end(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D, ttl=1.5)
    assert (cache.name, cache.length, cache.lengths) == ("cache-0", 0, (0,))
    assert (cache.num_kv_heads, cache.head_dim, cache.value_dim, cache.layers) == (H, D, D, 1)
    assert (cache.dtype, cache.ttl) == ("float32", 1.5)
    assert cache.append(*part(0, 5)) == 5
    assert cache.append(KEYS[0, :, 5:8], VALUES[0, :, 5:8]) == 8
    assert cache.append(KEYS[0, :, 8:9].swapaxes(0, 1), VALUES[0, :, 8:9].swapaxes(0, 1), layout="length_first") == 9
    assert cache.length == 9

    result = cache.attend(QUERY)
    np.testing.assert_allclose(result.output, reference(9), atol=1e-6)
    assert (result.cache_lengths, cache.length) == ((9,), 9)
    queries = normal(3, 1, H, 2, D)
    result = cache.attend(queries, *part(9, 11), causal=True)
    np.testing.assert_allclose(result.output, reference(11, queries, True), atol=1e-6)
    assert (result.cache_lengths, cache.length) == ((11,), 11)

    branch = cache.fork()
    assert (branch.name, branch.length, branch.ttl) == ("cache-1", 11, 1.5)
    branch.append(KEYS[:, :, :4], VALUES[:, :, 4:8])
    np.testing.assert_allclose(cache.attend(QUERY).output, reference(11), atol=1e-6)
    assert (cache.length, branch.length) == (11, 15)
    cache.truncate(7)
    assert cache.length == 7
    np.testing.assert_allclose(cache.attend(QUERY).output, reference(7), atol=1e-6)
    assert cache.info().bytes == 7 * 2 * H * D * 8

    assert [info.name for info in client.caches.list()] == ["cache-0", "cache-1"]
    cache.delete()
    cache.delete()
    client.caches.delete(branch.name)
    assert keeper.caches == {}
    with pytest.raises(NotFoundError):
        cache.attend(QUERY)


def test_layers_have_lengths_of_their_own(client: Any) -> None:
    cache = client.create_cache(H, D, layers=3)
    cache.append(*part(0, 4), layer=1)
    cache.attend(QUERY, *part(0, 6), layer=2)
    assert (cache.length, cache.lengths) == (0, (0, 4, 6))
    np.testing.assert_allclose(cache.attend(QUERY, layer=1).output, reference(4), atol=1e-6)
    cache.truncate(5)
    assert cache.lengths == (0, 4, 5)


def test_many_caches_in_one_call(client: Any) -> None:
    caches = [client.create_cache(H, D, layers=2) for _ in range(3)]
    for number, cache in enumerate(caches):
        cache.append(*part(0, number + 1), layer=1)
    query, key, value = normal(5, 3, H, 1, D), normal(6, 3, H, 1, D), normal(7, 3, H, 1, D)
    result = client.attend(query, key, value, caches=caches, cache_layer=1, causal=True)
    assert result.cache_lengths == (2, 3, 4)
    assert [cache.lengths for cache in caches] == [(0, 2), (0, 3), (0, 4)]
    for number in range(3):
        keys = np.concatenate([KEYS[0, :, : number + 1], key[number]], 1)
        values = np.concatenate([VALUES[0, :, : number + 1], value[number]], 1)
        expected = attention(query[number], keys, values, True)
        np.testing.assert_allclose(result.output[number], expected, atol=1e-6)
    again = client.attend(query, caches=caches, cache_layer=1)
    np.testing.assert_array_equal(again.output, result.output)


def test_a_layer_keeps_its_keys_in_caches(client: Any, keeper: Keeper) -> None:
    caches = [client.create_cache(1, D, layers=2) for _ in range(2)]
    input = normal(8, 2, 4, D)
    result = client.apply("decoder", input, caches=caches, lengths=[4, 2])
    assert (result.cache_lengths, [cache.lengths for cache in caches]) == ((4, 2), [(4, 4), (2, 2)])
    np.testing.assert_allclose(result.output[1, 0], input[1, :2].sum(0), rtol=1e-5)
    result = client.apply("decoder", input[:1, :1], cache=caches[0], causal=True)
    assert caches[0].lengths == (5, 5)
    sent = keeper.asked[-1][1]
    assert (sent.caches[0].name, sent.caches[0].expected_length, sent.caches[0].layer) == ("cache-0", 4, 0)
    assert (sent.causal, sent.alignment) == (True, pb.ALIGNMENT_UNSPECIFIED)


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (False, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (None, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (True, (True, pb.ALIGNMENT_UNSPECIFIED)),
        (1, (True, pb.ALIGNMENT_UNSPECIFIED)),
        ("top_left", (True, pb.ALIGNMENT_TOP_LEFT)),
        ("bottom_right", (True, pb.ALIGNMENT_BOTTOM_RIGHT)),
    ],
)
def test_what_causal_says_of_a_cache(client: Any, keeper: Keeper, causal: Any, expected: tuple[bool, int]) -> None:
    """Servers align to the bottom right by default: a new token sees all tokens before it."""
    cache = client.create_cache(H, D)
    cache.attend(QUERY, *part(0, 3), causal=causal, softcap=30.0)
    sent = keeper.asked[-1][1]
    assert ((sent.causal, sent.alignment), sent.softcap) == (expected, 30.0)
    assert sent.caches[0].expected_length == 0


@pytest.mark.parametrize(
    "dtype", ["bfloat16", np.dtype("float16"), np.float32, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16]
)
def test_what_is_created(client: Any, keeper: Keeper, dtype: Any) -> None:
    cache = client.create_cache(num_kv_heads=4, head_dim=64, value_dim=32, layers=2, dtype=dtype, ttl=0.25)
    dtype = np.dtype(dtype)
    assert (cache.value_dim, cache.layers, cache.dtype, cache.ttl) == (32, 2, str(dtype), 0.25)
    sent = keeper.asked[-1][1]
    assert (sent.dtype, sent.ttl.ToMilliseconds()) == (tensor_pb2.DataType.Value(f"DATA_TYPE_{dtype}".upper()), 250)
    for ttl, nanoseconds in ((1e-12, 1), (315576000000, 315576000000 * 10**9)):
        client.create_cache(H, D, ttl=ttl)
        assert keeper.asked[-1][1].ttl.ToNanoseconds() == nanoseconds
    fork = cache.fork(ttl=9)
    assert (fork.ttl, fork.value_dim, fork.lengths) == (9.0, 32, (0, 0))
    client.create_cache(1, 1)
    assert {field.name for field, _ in keeper.asked[-1][1].ListFields()} == {
        "num_kv_heads",
        "head_dim",
        "layers",
        "dtype",
        "request_id",
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads: expected an integer of 1 or more, found 0"),
        ({"num_kv_heads": 2**32}, "num_kv_heads: expected an integer below 2**32, found 4294967296"),
        ({"head_dim": 1.5}, "head_dim: expected an integer"),
        ({"value_dim": -1}, "value_dim: expected an integer of 1 or more"),
        ({"layers": 0}, "layers: expected an integer of 1 or more"),
        ({"dtype": "int64"}, "dtype: expected one of"),
        ({"dtype": np.floating}, "dtype: expected one of"),
        ({"dtype": dict}, "dtype: expected one of"),
        ({"ttl": 0}, "ttl: expected seconds"),
        ({"ttl": float("inf")}, "ttl: expected seconds"),
        ({"ttl": 1e300}, "ttl: expected seconds"),
        ({"ttl": "long"}, "ttl: expected a number"),
        ({"ttl": "5"}, "ttl: expected a number"),
        ({"ttl": True}, "ttl: expected a number"),
        ({"layers": True}, "layers: expected an integer"),
    ],
)
def test_what_cannot_be_created(client: Any, keeper: Keeper, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.create_cache(**({"num_kv_heads": H, "head_dim": D} | options))
    assert caught.value.field == words.partition(":")[0]
    assert str(caught.value).startswith(words)
    assert keeper.asked == []


def test_what_no_cache_takes(client: Any, keeper: Keeper) -> None:
    cache, other = client.create_cache(H, D, layers=2), client.create_cache(H, D)
    again = client.open_cache(cache.name)
    keeper.asked.clear()
    refused: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
        (cache.append, (*part(0, 2),), {"layer": 2}, "layer"),
        (cache.append, (*part(0, 2),), {"layout": "packed"}, "layout"),
        (cache.append, (KEYS[0, 0], VALUES[0, 0]), {}, "key"),
        (cache.append, (KEYS, np.concatenate([VALUES, VALUES])), {}, "value"),
        (cache.append, (KEYS.astype(int), VALUES), {}, "key"),
        (cache.append, part(0, 2), {"timeout": -1}, "timeout"),
        (cache.append, part(0, 2), {"expected_length": -1}, "expected_length"),
        (cache.append, part(0, 2), {"expected_length": 1.5}, "expected_length"),
        (cache.truncate, (-1,), {}, "length"),
        (cache.attend, (QUERY, KEYS), {}, "value"),
        (cache.attend, (QUERY, None, VALUES), {}, "key"),
        (cache.attend, (QUERY,), {"layer": -1}, "layer"),
        (cache.attend, (QUERY,), {"layer": 2}, "layer"),
        (client.attend, (QUERY,), {}, "key"),
        (client.attend, (QUERY,), {"caches": []}, "caches"),
        (client.attend, (QUERY,), {"caches": [cache, "cache-0"]}, "caches"),
        (client.attend, (QUERY,), {"caches": [cache, again]}, "caches"),
        (client.attend, (QUERY,), {"caches": {cache, other}}, "caches"),  # which is the first sequence's?
        (client.apply, ("decoder", QUERY), {"caches": frozenset((cache,))}, "caches"),
        (client.attend, (QUERY,), {"caches": [cache, other], "cache_layer": 1}, "cache_layer"),
        (client.apply, ("decoder", QUERY), {"cache": cache, "caches": [cache]}, "caches"),
    ]
    for method, arguments, options, field in refused:
        with pytest.raises(InvalidRequestError) as caught:
            method(*arguments, **options)
        assert caught.value.field == field, (arguments, options)
    assert keeper.asked == []
    with pytest.raises(InvalidRequestError):
        cache.truncate(1)  # longer than every layer: the server says so


def test_no_caches_are_deleted_without_asking(client: Any, keeper: Keeper) -> None:
    assert client.caches.delete([]) == 0
    assert client.caches.delete(()) == 0
    assert keeper.asked == []


def test_what_is_deleted_is_counted(client: Any, keeper: Keeper) -> None:
    """An alias is no name: nothing of it is deleted, and that can be seen."""
    one, two, three, four = (client.create_cache(H, D, alias=alias) for alias in ("user:42", None, None, None))
    assert client.caches.delete("user:42") == 0
    assert len(keeper.caches) == 4
    assert client.caches.delete([one, one.name, one, two.name, two.name, "nobody"]) == 2
    assert client.caches.delete(one) == 0
    assert client.caches.delete([three, four]) == 2
    assert keeper.caches == {}
    names = [client.create_cache(1, 1).name for _ in range(3)]
    assert client.caches.delete([*names[:2], *["nobody"] * 600, names[2]]) == 3  # of more than one request

    def exaggerate(answer: Any, context: Any) -> None:
        answer.deleted = 3

    keeper.after["Delete"] = exaggerate
    with pytest.raises(ProtocolError, match="deleted: expected at most 2, the server replied with 3"):
        client.caches.delete(["a", "b"])


def test_a_cache_of_another_client(address: str) -> None:
    with Client(address) as one, Client(address) as other:
        cache = one.create_cache(H, D)
        with pytest.raises(
            InvalidRequestError, match=r"of this client, found one of another client, .* open_cache opens it"
        ):
            other.attend(QUERY, caches=[cache])
        with pytest.raises(InvalidRequestError, match=r"^cache_layer: expected caches"):
            other.attend(QUERY, QUERY, QUERY, cache_layer=1)
        with pytest.raises(InvalidRequestError, match=r"^caches: expected .* of this client, found 5"):
            other.attend(QUERY, caches=5)  # type: ignore[arg-type]
        for named in (cache.name, [cache.name]):
            with pytest.raises(
                InvalidRequestError, match=r"^caches: .* found a string; open_cache makes a cache"
            ) as told:
                other.attend(QUERY, caches=named)  # type: ignore[arg-type]
            assert cache.name not in str(told.value)
        for nowhere in ("", "127.0.0.1:65536", "\ud800:1"):
            with pytest.raises(InvalidRequestError, match="address: expected"):
                other.open_cache(cache.name, address=nowhere)
        opened = other.open_cache(cache.name)
        opened.append(*part(0, 3))
        with pytest.raises(FailedPreconditionError) as caught:
            cache.append(*part(0, 2))
        assert (caught.value.actual_length, caught.value.resent, cache.length) == (3, False, 0)
        assert cache.refresh() == opened.info()
        assert cache.append(*part(3, 5)) == 5


def test_leaving_a_cache_deletes_it(address: str, keeper: Keeper) -> None:
    with Client(address) as client:
        with client.create_cache(H, D) as cache:
            assert list(keeper.caches) == [cache.name]
        assert keeper.caches == {}
        keeper.lose = ["Delete"] * 10
        with pytest.raises(UnavailableError), client.create_cache(H, D):
            pass
        keeper.lose = ["Delete"] * 10
        with pytest.raises(ZeroDivisionError), client.create_cache(H, D):
            raise ZeroDivisionError
        assert keeper.methods()[-4:] == ["Delete"] * 4


def test_a_cache_keeps_its_client(address: str) -> None:
    cache = Client(address).create_cache(H, D)
    gc.collect()
    assert isinstance(cache, Cache)
    assert cache.append(*part(0, 2)) == 2
    assert cache.bytes == 2 * 2 * H * D * 8


def test_a_future_that_is_done_keeps_no_client(address: str) -> None:
    client = Client(address)
    cache = client.create_cache(H, D)
    done, cancelled = client.submit(QUERY, *part(0, 1), caches=cache), client.submit(QUERY, caches=cache)
    cancelled.cancel()
    assert done.result().cache_lengths == (1,)
    gone = threading.Event()
    watch = weakref.ref(client._calls, lambda _: gone.set())
    del client, cache
    while not gone.wait(0.05):  # the thread that delivered the result may hold it for a moment
        gc.collect()
    assert watch() is None


def test_nonsense(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D)
    keeper.after["Attend"] = lambda answer, context: answer.ClearField("cache_lengths")
    with pytest.raises(ProtocolError, match="0 lengths"):
        cache.attend(QUERY, *part(0, 2))
    keeper.caches[cache.name].info.layers = 2
    with pytest.raises(ProtocolError, match="of no layers"):
        cache.refresh()


def test_a_peer_without_caches() -> None:
    with peer(good) as address, Client(address) as client:
        with pytest.raises(AttnServeError) as caught:
            client.create_cache(H, D)
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert client.attend(QUERY, QUERY, QUERY).cache_lengths == ()


def test_the_command_lists_caches(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["caches", address]) == 0
    assert capsys.readouterr().out == "no caches are open; 1,000 of 1,048,576 bytes are free\n"
    with Client(address) as client:
        client.create_cache(8, 64, value_dim=32, layers=4, dtype="bfloat16", ttl=600)
        client.create_cache(H, D, layers=2).append(*part(0, 20), layer=1)
    assert cli.main(["caches", address]) == 0
    title, first, second, room = capsys.readouterr().out.splitlines()
    assert title.split() == ["name", "alias", "dtype", "heads", "layers", "tokens", "bytes", "shared", "ttl", "left"]
    assert first.split() == ["cache-0", "bfloat16", "8", "×", "64/32", "4", "0", "0", "0", "600", "s", "600", "s"]
    assert second.split() == ["cache-1", "float32", "2", "×", "3", "2", "20", "1,920", "0"], "of the longest layer"
    assert room == "1,000 of 1,048,576 bytes are free"
    assert cli.main(["caches", address, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["bytes"], answer["free_bytes"]) == (1 << 20, 1000)
    fields = {field.name for field in dataclasses.fields(CacheInfo)}
    assert [set(cache) for cache in answer["caches"]] == [fields] * 2
    assert answer["caches"][1]["lengths"] == [0, 20]
    assert (answer["caches"][0]["ttl"], answer["caches"][1]["ttl"]) == (600.0, None)


def test_the_command_shows_short_leases(address: str, keeper: Keeper, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(address) as client:
        for ttl in (0.25, 1.5, 9.94, 9.96, 12.6, 3600):
            client.create_cache(1, 1, ttl=ttl)
    for kept, left in zip(keeper.caches.values(), (100, 1020, 60, 9960, 11_500, 3_599_400), strict=True):
        kept.info.remaining.FromMilliseconds(left)
    assert cli.main(["caches", address]) == 0
    told = [line.split()[-4:] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [(ttl, left) for ttl, _, left, _ in told] == [
        ("0.2", "0.1"),
        ("1.5", "1.0"),
        ("9.9", "0.1"),
        ("10", "10"),
        ("13", "12"),
        ("3,600", "3,599"),
    ]


def test_the_command_deletes_caches(address: str, keeper: Keeper, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(address) as client:
        for _ in range(5):
            client.create_cache(1, 1)
    keeper.caches["-dash"] = keeper.caches.pop("cache-4")
    keeper.caches["-dash"].info.name = "-dash"
    room = "1,000 of 1,048,576 bytes are free\n"
    names = (f"--delete={name}" for name in ("cache-0", "cache-2", "no-cache", "-dash"))
    assert cli.main(["caches", *names, address]) == 0
    assert capsys.readouterr() == (f"3 of 4 deleted; {room}", "")
    assert keeper.caches.keys() == {"cache-1", "cache-3"}
    assert cli.main(["caches", "--delete", "cache-0", "--delete", "cache-0", address]) == 0
    assert capsys.readouterr() == (f"0 of 1 deleted; {room}", "")
    assert (
        cli.main(["caches", "--json", "--delete", "cache-3", "--delete", "cache-3", "--delete", "cache-0", address])
        == 0
    )
    told = {"deleted": ["cache-3"], "bytes": 1 << 20, "free_bytes": 1000}
    assert json.loads(capsys.readouterr().out) == told
    assert keeper.caches.keys() == {"cache-1"}
    with pytest.raises(SystemExit):
        cli.main(["caches", address, "--delete"])
    assert "--delete" in capsys.readouterr().err
