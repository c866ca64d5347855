"""Decoders that keep their keys and values in caches, over the wire, against the modules of their checkpoints and
against themselves.

Pages are so small that sequences of GPT-2, Mistral and the decoder have two.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from calls import PATIENCE_S, metric
from checkpoints import CHECKPOINTS, VOCABULARY
from conftest import Models, Server
from decoders import DECODERS, WIDE, WINDOW, create_cache, write_wide
from resident_decoders import cached_server, client, modules, seed

from attnserve import Cache, Client, InvalidRequestError, LayerResult
from attnserve_server.native.library import available

__all__ = ["cached_server", "client", "modules", "seed"]  # fixtures

TOKENS = 31
CHUNKS = ([TOKENS], [22, 9], [1] * TOKENS, [3, 1, 1, 17, 5, 4])
EVERY_DECODER = pytest.mark.parametrize("name", DECODERS)


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


def test_a_cache_for_values_wider_than_keys_follows_from_what_the_server_says(client: Client, models: Models) -> None:
    write_wide(models.directory)
    (layer,) = client.layers.load(WIDE)
    assert (layer.head_dim, layer.value_dim) == (8, 20)
    x = torch.randn(TOKENS, layer.input_width)
    with create_cache(client, "wide") as cache:
        found = in_chunks(client, "wide", cache, x, [22, 8, 1])
    assert_near(found, client.apply("wide", x).output.double(), 1e-5)


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


needs_native = pytest.mark.skipif(
    not available() and "REQUIRE_NATIVE" not in os.environ, reason="there is no native kernel here"
)


@pytest.mark.parametrize(("name", "share"), [("gpt2", 15 / 16), pytest.param("mistral/whole", 0, marks=needs_native)])
def test_padding_of_a_step(cached_server: Server, client: Client, name: str, share: float) -> None:
    """Where rows are filled up, most of those of a single sequence's step are padding."""

    def told() -> float:
        return metric(cached_server.http_address, "attnserve_batch_padding_ratio_sum")

    with create_cache(client, name) as cache:
        before = told()
        client.apply(name, torch.zeros(1, dtype=torch.int64), cache=cache)
        assert told() - before == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "mistral/bfloat16", "mistral/whole"])
def test_batches_change_no_bits(client: Client, name: str) -> None:
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


def test_what_is_not_finite_stays_in_its_sequence(client: Client) -> None:
    """In a batch, and before the token that has it: what comes after that has nothing else."""
    name, lengths = "decoder/stack/float32", [6, 9, 1]
    xs = [sequence("decoder/stack", length) for length in lengths]
    inputs, contexts = (torch.cat([typed(each, "float32") for each in parts]) for parts in zip(
        *((x, options["context"]) for x, options in xs), strict=True
    ))  # fmt: skip
    spoilt = inputs.clone()
    spoilt[11] = torch.nan
    outputs = []
    for rows in (inputs, spoilt):
        caches = [create_cache(client, name) for _ in lengths]
        result = client.apply(name, rows, caches=caches, lengths=lengths, context=contexts, context_lengths=[5] * 3)
        steps = client.apply(
            name, inputs[:3], caches=caches, lengths=[1] * 3, context=contexts, context_lengths=[5] * 3
        )
        outputs.append((result.output, steps.output))
        for cache in caches:
            cache.delete()
    (clean, clean_steps), (found, found_steps) = outputs
    for own in (slice(0, 6), slice(15, 16)):
        assert_same_bits(found[own].numpy(), clean[own].numpy())
    assert_near(found[6:11], clean[6:11], 1e-5)
    assert found[11:15].isnan().all()
    for row in (0, 2):
        assert_same_bits(found_steps[row].numpy(), clean_steps[row].numpy())
    assert found_steps[1].isnan().all()


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
