"""Decoders that keep their keys and values in caches, over the wire, against the modules of their checkpoints and
against themselves.

Pages are so small that sequences of GPT-2, Mistral and the decoder have two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from checkpoints import CHECKPOINTS, VOCABULARY
from conftest import Models, Server
from decoders import DECODERS, MISTRAL, WINDOW, create_cache, write_mistral

from attnserve import Cache, Client, FailedPreconditionError, InvalidRequestError, LayerResult, NotFoundError
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

PATIENCE_S = 60.0
TOKENS = 31
CHUNKS = ([TOKENS], [22, 9], [1] * TOKENS, [3, 1, 1, 17, 5, 4])
EVERY_DECODER = pytest.mark.parametrize("name", DECODERS)


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(7)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def modules(models: Models) -> dict[str, Any]:
    return models.modules | {"mistral": write_mistral(models.directory)}


@pytest.fixture(scope="module")
def cached_server(
    models: Models, modules: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = (
        "--layers",
        str(models.directory / "layers.toml"),
        "--cache-page-bytes",
        "4096",
        "--cache-bytes",
        "16777216",
    )
    server = Server(flags, tmp_path_factory.mktemp("cached-server") / "stderr")
    yield server
    assert server.process.poll() is None, f"the server died\n{server.stderr()}"
    assert server.stop() == 0, server.stderr()


@pytest.fixture(scope="module")
def client(cached_server: Server) -> Iterator[Client]:
    with Client(cached_server.address) as client:
        client.layers.load(MISTRAL)
        yield client


def sequence(name: str, length: int = TOKENS) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids, or activations and the context that they go with."""
    if name != "decoder/stack":
        return torch.randint(VOCABULARY, (length,)), {}
    return torch.randn(length, 24).double(), {"context": torch.randn(5, 24).double()}


def typed(tensor: Any, dtype: str) -> Any:
    floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return tensor.to(getattr(torch, dtype)) if floating else tensor


def whole(module: Any, name: str, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The module's output for a whole sequence."""
    reference = CHECKPOINTS["llama" if name == "mistral" else name].reference
    expected: torch.Tensor = reference(module, x, options.get("context"))
    return expected


def in_chunks(
    client: Client, name: str, cache: Cache, x: torch.Tensor, chunks: Sequence[int], **options: Any
) -> torch.Tensor:
    """The outputs of a sequence that comes in chunks, end to end."""
    return torch.cat([client.apply(name, part, cache=cache, **options).output for part in torch.split(x, list(chunks))])


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    bound = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=bound)


@EVERY_DECODER
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_prefill_in_any_chunks(client: Client, modules: dict[str, Any], name: str, dtype: str) -> None:
    """At once, in chunks and token by token: the module's output for the whole."""
    x, options = sequence(name)
    expected = whole(modules[name], name, x, options)
    layer = name if dtype == "float64" else f"{name}/{dtype}"
    x, options = typed(x, dtype), {key: typed(value, dtype) for key, value in options.items()}
    for chunks in CHUNKS:
        with create_cache(client, layer) as cache:
            assert_near(in_chunks(client, layer, cache, x, chunks, **options), expected, 1e-5)
            assert set(cache.info().lengths) == {TOKENS}


def test_a_window_excludes_what_is_behind_it(client: Client, modules: dict[str, Any]) -> None:
    """Blocks see WINDOW tokens: after enough of them, nothing of the first token is left."""
    reach = 1 + modules["mistral"].config.num_hidden_layers * (WINDOW - 1)
    first, others = torch.randint(VOCABULARY - 1, (1,)), torch.randint(VOCABULARY, (reach,))
    outputs = []
    for token in (first, first + 1):
        with create_cache(client, "mistral") as cache:
            outputs.append(
                in_chunks(client, "mistral", cache, torch.cat([token, others]), [reach // 2, reach - reach // 2, 1])
            )
    assert_same_bits(outputs[0][-1].numpy(), outputs[1][-1].numpy())
    assert not torch.equal(outputs[0][-2], outputs[1][-2])


@EVERY_DECODER
def test_the_same_chunks_give_the_same_bits(client: Client, name: str) -> None:
    """After truncation and replay, and in forks whose siblings diverged."""
    x, options = sequence(name)
    other, _ = sequence(name)
    chunks = [11, 1, 7, 12]
    parts, strays = torch.split(x, chunks), torch.split(other, chunks)
    with create_cache(client, name) as cache:
        expected = [client.apply(name, part, cache=cache, **options).output for part in parts]
    with create_cache(client, name) as cache:
        client.apply(name, parts[0], cache=cache, **options)
        for part in strays[1:]:
            client.apply(name, part, cache=cache, **options)
        cache.truncate(chunks[0])
        for part, output in zip(parts[1:], expected[1:], strict=True):
            assert_same_bits(client.apply(name, part, cache=cache, **options).output.numpy(), output.numpy())
    with create_cache(client, name) as cache:
        client.apply(name, parts[0], cache=cache, **options)
        with cache.fork() as fork:
            for part, stray, output in zip(parts[1:], strays[1:], expected[1:], strict=True):
                client.apply(name, stray, cache=cache, **options)
                assert_same_bits(client.apply(name, part, cache=fork, **options).output.numpy(), output.numpy())
            assert cache.info().lengths == fork.info().lengths


@EVERY_DECODER
@pytest.mark.parametrize("packed", [True, False])
def test_a_ragged_batch_of_caches(client: Client, name: str, packed: bool) -> None:
    """One message continues many sequences: each has the bits that it has alone, even one with nothing to add."""
    befores, lengths = [5, 0, 13, 1], [3, 7, 0, 30]
    xs = [sequence(name, before + length) for before, length in zip(befores, lengths, strict=True)]
    alone = []
    for (x, options), before in zip(xs, befores, strict=True):
        with create_cache(client, name) as cache:
            for part in (x[:before], x[before:]):
                result = client.apply(name, part, cache=cache, **options)
            alone.append(result.output)
    caches = [create_cache(client, name) for _ in xs]
    for cache, (x, options), before in zip(caches, xs, befores, strict=True):
        client.apply(name, x[:before], cache=cache, **options)
    parts = [x[before:] for (x, _), before in zip(xs, befores, strict=True)]
    contexts = [options["context"] for _, options in xs if options]
    batch: dict[str, Any] = {"lengths": lengths}
    if contexts:
        batch["context"] = torch.cat(contexts) if packed else torch.stack(contexts)
        batch |= {"context_lengths": [5] * len(xs)} if packed else {}
    arrange: Any = torch.cat if packed else lambda each: torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
    result = client.apply(name, arrange(parts), caches=caches, **batch)
    assert result.cache_lengths == tuple(before + length for before, length in zip(befores, lengths, strict=True))
    rows = result.output.split(lengths) if packed else [out[:n] for out, n in zip(result.output, lengths, strict=True)]
    for row, expected in zip(rows, alone, strict=True):
        assert_same_bits(row.numpy(), expected.numpy())
    for cache in caches:
        cache.delete()


@pytest.mark.parametrize("name", ["gpt2", "mistral/bfloat16"])
def test_company_changes_no_bits(client: Client, name: str) -> None:
    """Many sequences step at once, forks and unrelated ones, beside applications without caches."""
    prefix, steps = torch.randint(VOCABULARY, (9,)), torch.randint(VOCABULARY, (8, 3))
    alone = []
    for own in steps:
        with create_cache(client, name) as cache:
            alone.append(in_chunks(client, name, cache, torch.cat([prefix, own]), [9, 1, 2])[9:])
    plain = client.apply(name, prefix).output
    root = create_cache(client, name)
    client.apply(name, prefix, cache=root)
    caches = [root.fork() for _ in steps[:5]] + [create_cache(client, name) for _ in steps[5:]]
    for cache in caches[5:]:
        client.apply(name, prefix, cache=cache)
    found: list[list[LayerResult[torch.Tensor]]] = []
    for begin, end in ((0, 1), (1, 3)):
        futures = []
        for cache, own in zip(caches, steps, strict=True):
            futures += [client.submit_apply(name, own[begin:end], cache=cache), client.submit_apply(name, prefix)]
        wait(futures, PATIENCE_S)
        found.append([future.result() for future in futures])
    for n, expected in enumerate(alone):
        both = torch.cat([step[2 * n].output for step in found])
        assert torch.equal(both.view(torch.uint8), expected.view(torch.uint8))
    for result in itertools.chain(*(step[1::2] for step in found)):
        assert torch.equal(result.output.view(torch.uint8), plain.view(torch.uint8))
    for cache in (root, *caches):
        cache.delete()


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_storage_in_half_precision(client: Client, modules: dict[str, Any], storage: str) -> None:
    x, _ = sequence("llama")
    with create_cache(client, "llama/float32", storage) as cache:
        found = in_chunks(client, "llama/float32", cache, x, [20, 1, 10])
    expected = whole(modules["llama"], "llama", x, {})
    bound = {"float16": 4e-3, "bfloat16": 3e-2}[storage]
    assert_near(found, expected, bound)
    assert (found - expected).abs().max() > 1e-5  # it is what was asked for, not float32


@pytest.mark.parametrize("name", ["gpt2", "decoder/stack"])
def test_a_mask_over_what_the_cache_has(client: Client, name: str) -> None:
    """The rows of the mask of the whole, part by part."""
    x, options = sequence(name, 14)
    mask = torch.rand(4, 14, 14) < 0.6
    expected = client.apply(name, x, mask=mask, **options).output
    with create_cache(client, name) as cache:
        begin, found = 0, []
        for end in (6, 7, 14):
            part = mask[:, begin:end, :end]
            found.append(client.apply(name, x[begin:end], cache=cache, mask=part, **options).output)
            begin = end
        assert_near(torch.cat(found), expected, 1e-5)
        with pytest.raises(InvalidRequestError) as caught:
            client.apply(name, x[:1], cache=cache, mask=mask[:, :1, :14], **options)
        assert caught.value.field == "mask.shape"
        assert cache.info().lengths == (14,) * cache.layers


def test_masks_of_a_batch(client: Client) -> None:
    """Each sequence has its own, of a length of its own."""
    befores, masks = [3, 8], torch.rand(2, 1, 4, 12) < 0.6
    xs = torch.randint(VOCABULARY, (2, 12))
    alone = []
    caches = [create_cache(client, "gpt2") for _ in xs]
    for n, (cache, before) in enumerate(zip(caches, befores, strict=True)):
        client.apply("gpt2", xs[n, :before], cache=cache)
        with cache.fork() as fork:
            own = masks[n, :, :, : before + 4]
            alone.append(client.apply("gpt2", xs[n, before : before + 4], cache=fork, mask=own).output)
    inputs = torch.stack([x[before : before + 4] for x, before in zip(xs, befores, strict=True)])
    found = client.apply("gpt2", inputs, caches=caches, mask=masks).output
    for one, other in zip(found, alone, strict=True):
        assert_same_bits(one.numpy(), other.numpy())
    for cache in caches:
        cache.delete()


def reference(cache: Cache, **fields: Any) -> pb.CacheReference:
    return pb.CacheReference(name=cache.name, **fields)


def ids(*shape: int) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype="DATA_TYPE_INT64", shape=shape, data=np.ones(shape, np.int64).tobytes())


def floats(*shape: int) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype="DATA_TYPE_FLOAT64", shape=shape, data=np.ones(shape).tobytes())


def replies(server: Server, requests: Sequence[pb.ApplyRequest]) -> list[pb.AttendStreamReply]:
    """The replies to calls sent in one message, in their order."""
    calls = [pb.AttendStreamCall(id=n, apply=request) for n, request in enumerate(requests)]
    message = pb.AttendStreamRequest(calls=calls).SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        method: Any = channel.stream_stream("/attnserve.v1.AttentionService/AttendStream")
        found = [
            reply
            for received in method(iter([message]), timeout=PATIENCE_S)
            for reply in pb.AttendStreamResponse.FromString(received).replies
        ]
    return sorted(found, key=lambda reply: reply.id)


def test_requests_with_caches_share_batches(client: Client, cached_server: Server) -> None:
    """Those of one layer, and those without caches apart."""
    caches = [create_cache(client, "gpt2") for _ in range(3)]
    with_caches = [pb.ApplyRequest(layer="gpt2", caches=[reference(cache)], input=ids(4)) for cache in caches]
    without = [pb.ApplyRequest(layer="gpt2", input=ids(4))] * 2
    found = replies(cached_server, [with_caches[0], without[0], with_caches[1], without[1], with_caches[2]])
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
        (ours | {"alignment": pb.ALIGNMENT_BOTTOM_RIGHT}, "alignment"),
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
    keys = torch.randn(4, 1, 6)
    caches[1].append(keys, keys, layer=1)
    with pytest.raises(FailedPreconditionError, match="3 to 4 tokens") as caught:
        client.apply("gpt2", torch.randint(VOCABULARY, (1,)), cache=caches[1])
    assert caught.value.actual_length is None
    assert caches[1].info().lengths == (3, 4)
    for cache in caches:
        cache.delete()
    with pytest.raises(NotFoundError):
        client.apply("gpt2", torch.randint(VOCABULARY, (1,)), cache=caches[1])
