"""Requests to apply decoders to caches, over the wire: which of them share batches, and which are refused, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import calls
import grpc
import numpy as np
import pytest
import torch
from checkpoints import VOCABULARY
from conftest import Server
from decoders import create_cache
from occupied import Occupied
from resident_decoders import cached_server, client, modules, seed

from attnserve import Cache, Client, FailedPreconditionError, InvalidRequestError, NotFoundError
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

__all__ = ["cached_server", "client", "modules", "seed"]  # fixtures


def reference(cache: Cache, **fields: Any) -> pb.CacheReference:
    return pb.CacheReference(name=cache.name, **fields)


def ids(*shape: int) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype="DATA_TYPE_INT64", shape=shape, data=np.ones(shape, np.int64).tobytes())


def floats(*shape: int) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype="DATA_TYPE_FLOAT64", shape=shape, data=np.ones(shape).tobytes())


def replies(server: Server, requests: Sequence[pb.ApplyRequest], *, waiting: int = 0) -> list[pb.AttendStreamReply]:
    """The replies to calls sent in one message, in their order. None runs before so many of them wait."""
    with grpc.insecure_channel(server.address) as channel:
        stream = calls.Stream(channel)
        with Occupied(server) as device:  # however long it takes to read them
            stream.send(*(pb.AttendStreamCall(id=n, apply=request) for n, request in enumerate(requests)))
            stream.half_close()
            device.until_waiting(waiting)
        return sorted(stream.rest(), key=lambda reply: reply.id)


def test_requests_with_caches_share_batches(client: Client, cached_server: Server) -> None:
    """Those of one layer, and those without caches apart."""
    caches = [create_cache(client, "gpt2") for _ in range(3)]
    with_caches = [pb.ApplyRequest(layer="gpt2", caches=[reference(cache)], input=ids(4)) for cache in caches]
    without = [pb.ApplyRequest(layer="gpt2", input=ids(4))] * 2
    mixed = [with_caches[0], without[0], with_caches[1], without[1], with_caches[2]]
    found = replies(cached_server, mixed, waiting=len(mixed))
    assert [reply.apply.batch_size for reply in found] == [3, 2, 3, 2, 3]
    assert [list(reply.apply.cache_lengths) for reply in found] == [[4], [], [4], [], [4]]
    assert len({reply.apply.output.data for reply in found[::2]}) == 1
    # The same cache again takes another turn: the later request sees what came before.
    found = replies(cached_server, with_caches[:1] * 3)
    assert [list(reply.apply.cache_lengths) for reply in found] == [[8], [12], [16]]
    for cache in caches:
        cache.delete()


def test_what_does_not_fit_is_named(client: Client, cached_server: Server) -> None:
    """And nothing is appended."""
    heads: dict[str, Any] = {"num_kv_heads": 4, "head_dim": 6, "layers": 2}
    good = create_cache(client, "gpt2")
    wrong = [
        client.create_cache(**(heads | each))
        for each in ({"layers": 3}, {"num_kv_heads": 2}, {"head_dim": 8}, {"value_dim": 5})
    ]
    ours: dict[str, Any] = {"layer": "gpt2", "input": ids(2), "caches": [reference(good)]}
    offset = ids(1)
    cases: list[tuple[dict[str, Any], str]] = [
        *((ours | {"caches": [reference(cache)]}, "caches[0].name") for cache in wrong),
        (ours | {"input": ids(2, 2), "caches": [reference(good), reference(wrong[0])]}, "caches[1].name"),
        (ours | {"input": ids(2, 2), "caches": [reference(good), reference(good)]}, "caches[1].name"),
        (ours | {"caches": [reference(good, layer=1)]}, "caches[0].layer"),
        (ours | {"input": ids(2, 2)}, "caches"),
        (ours | {"input": ids(1 << 20, 0)}, "caches"),
        (ours | {"query_offset": offset}, "query_offset"),
        (ours | {"alignment": pb.ALIGNMENT_TOP_LEFT}, "alignment"),
        (ours | {"causal": True}, "causal"),
        (ours | {"input": ids(33)}, "input"),
        (ours | {"layer": "bert"}, "caches"),
        (ours | {"layer": "encoder/stack", "input": floats(2, 24)}, "caches"),
        (ours | {"layer": "alibi", "input": floats(2, 24)}, "caches"),
        (ours | {"layer": "additive", "input": floats(2, 24)}, "caches"),
    ]  # fmt: skip
    found = replies(cached_server, [pb.ApplyRequest(**fields) for fields, _ in cases])
    for reply, (fields, path) in zip(found, cases, strict=True):
        assert reply.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], (path, reply)
        assert reply.error.message.startswith(f"{path}: expected "), (fields, reply.error.message)
    (gone,) = replies(cached_server, [pb.ApplyRequest(**ours | {"caches": [pb.CacheReference(name="nobody")]})])
    assert gone.error.code == grpc.StatusCode.NOT_FOUND.value[0]
    assert set(good.info().lengths) == {0}
    for cache in (good, *wrong):
        cache.delete()


def test_positions_go_on_which_is_bottom_right(client: Client, cached_server: Server) -> None:
    caches = [create_cache(client, "gpt2") for _ in range(2)]
    for cache in caches:
        client.apply("gpt2", torch.arange(3), cache=cache)
    requests = [
        pb.ApplyRequest(layer="gpt2", input=ids(2), caches=[reference(cache)], alignment=alignment)
        for cache, alignment in zip(caches, (pb.ALIGNMENT_UNSPECIFIED, pb.ALIGNMENT_BOTTOM_RIGHT), strict=True)
    ]
    requests[1].input.CopyFrom(requests[0].input)
    first, second = replies(cached_server, requests)
    assert first.apply.output == second.apply.output
    assert first.apply.output.data
    for cache in caches:
        cache.delete()


def test_positions_end(client: Client) -> None:
    """GPT-2 has 32 of them: a request that would exceed them gets an error that says so, and can be shortened."""
    with create_cache(client, "gpt2") as cache:
        client.apply("gpt2", torch.randint(VOCABULARY, (30,)), cache=cache)
        with pytest.raises(
            InvalidRequestError, match="input: expected positions from 0 to 31, found 30 to 32"
        ) as caught:
            client.apply("gpt2", torch.randint(VOCABULARY, (3,)), cache=cache)
        assert caught.value.field == "input"
        assert client.apply("gpt2", torch.randint(VOCABULARY, (2,)), cache=cache).cache_lengths == (32,)


def test_lengths_that_nobody_expects(client: Client, cached_server: Server) -> None:
    """All caches of a request are as long as expected, or none grows."""
    caches = [create_cache(client, "gpt2") for _ in range(2)]
    client.apply("gpt2", torch.randint(VOCABULARY, (2, 3)), caches=caches)
    references = [reference(caches[0], expected_length=3), reference(caches[1], expected_length=2)]
    (refused,) = replies(cached_server, [pb.ApplyRequest(layer="gpt2", input=ids(2, 1), caches=references)])
    assert refused.error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert [cache.info().lengths for cache in caches] == [(3, 3), (3, 3)]
    # Another client goes on with the cache: this one is told the present length.
    with Client(cached_server.address) as other:
        other.apply("gpt2", torch.randint(VOCABULARY, (2,)), cache=other.open_cache(caches[0].name))
    with pytest.raises(FailedPreconditionError) as caught:
        client.apply("gpt2", torch.randint(VOCABULARY, (1,)), cache=caches[0])
    assert caught.value.actual_length == 5
    # A decoder's layers all have one length.
    caches[0].refresh()
    keys = torch.randn(4, 1, 6)
    caches[1].append(keys, keys, layer=1)
    with pytest.raises(FailedPreconditionError, match="3 to 4 tokens") as caught:
        client.apply("gpt2", torch.randint(VOCABULARY, (1,)), cache=caches[1])
    assert (caught.value.actual_length, caught.value.name) == (None, caches[1].name)
    with pytest.raises(FailedPreconditionError, match=r"^caches\[1\] has 3 to 4 tokens in its layers; ") as caught:
        client.apply("gpt2", torch.randint(VOCABULARY, (2, 1)), caches=caches)
    assert caught.value.name == caches[1].name
    assert caches[1].info().lengths == (3, 4)
    for cache in caches:
        cache.delete()
    with pytest.raises(NotFoundError):
        client.apply("gpt2", torch.randint(VOCABULARY, (1,)), cache=caches[1])
