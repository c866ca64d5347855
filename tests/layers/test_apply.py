"""A server's layers, applied over the wire, against the modules that their checkpoints come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from applied import CONTEXT_LENGTHS, FLOAT32, LENGTHS, assert_near, contexts, packed, references, sequences, typed
from bits import assert_same_bits, bits
from checkpoints import CHECKPOINTS, HEADS, VOCABULARY
from conftest import Models
from torch.nn.utils.rnn import pad_sequence

from attnserve import Client


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(3)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_layer_gives_what_its_module_gives(
    layer_client: Client, models: Models, name: str, dtype: torch.dtype
) -> None:
    """Sequences packed, padded and each by itself give the same bits."""
    layer, module = CHECKPOINTS[name], models.modules[name]
    resident, tolerance = (name, layer.tolerance) if dtype == torch.float64 else (f"{name}/float32", FLOAT32)
    xs, zs = sequences(layer), contexts(layer)
    x, options = packed(xs, zs, dtype)
    result = layer_client.apply(resident, x, **options)
    assert result.output.dtype == dtype
    expected = references(layer, module, xs, zs)
    assert_near(result.output, expected, max(tolerance, layer.tolerance))

    padding = 0 if layer.width == 0 else torch.nan
    options = {"lengths": options["lengths"]}
    if zs is not None:
        options["context"] = pad_sequence([z.to(dtype) for z in zs], True, torch.nan)
        options["context_lengths"] = CONTEXT_LENGTHS
    padded = layer_client.apply(resident, pad_sequence([typed(x, dtype) for x in xs], True, padding), **options).output
    assert (padded[[length < max(LENGTHS) for length in LENGTHS], -1] == 0).all()
    rows = torch.cat([padded[n, :length] for n, length in enumerate(LENGTHS)])
    assert_same_bits(rows.numpy(), result.output.numpy(), "padded")

    own: list[dict[str, Any]] = [{} if zs is None else {"context": zs[n].to(dtype)} for n in range(len(xs))]
    alone = [layer_client.apply(resident, typed(x, dtype), **own[n]).output for n, x in enumerate(xs)]
    assert_same_bits(torch.cat(alone).numpy(), result.output.numpy(), "alone")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["attention", "attention/over", "encoder/gelu/pre", "decoder/relu/post", "bert"])
def test_half_precisions(layer_client: Client, models: Models, name: str, dtype: torch.dtype) -> None:
    """At most twice the error of torch's own modules in that dtype, against float64 with the same rounded weights."""
    layer = CHECKPOINTS[name]
    module = layer.module().eval()
    module.load_state_dict(models.modules[name].state_dict())
    module = module.to(dtype)
    xs = [typed(x, dtype) for x in sequences(layer, [7, 1, 12, 3])]
    zs = contexts(layer)
    zs = None if zs is None else [z.to(dtype) for z in zs[: len(xs)]]
    x, options = packed(xs, zs, dtype)
    found = layer_client.apply(f"{name}/{str(dtype).removeprefix('torch.')}", x, **options).output
    theirs = references(layer, module, xs, zs)
    exact = references(layer, module.double(), [typed(x, torch.float64) for x in xs], zs and [z.double() for z in zs])
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max() + 1e-5


@pytest.mark.parametrize("layer_dtype", ["", "/float32", "/bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_an_input_of_another_dtype(layer_client: Client, layer_dtype: str, dtype: torch.dtype) -> None:
    """The input is converted to the layer's dtype, and the reply back to the input's."""
    own = torch.float64 if not layer_dtype else getattr(torch, layer_dtype.removeprefix("/"))
    x, z = torch.randn(2, 5, 24).to(dtype), torch.randn(2, 6, 10).to(dtype)
    options: dict[str, Any] = {"return_lse": True, "return_scores": "weights"}
    found = layer_client.apply(f"attention/over{layer_dtype}", x, context=z, **options)
    expected = layer_client.apply(f"attention/over{layer_dtype}", x.to(own), context=z.to(own), **options)
    for name in ("output", "scores"):
        tensor = getattr(found, name)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, getattr(expected, name).to(dtype))
    assert found.lse is not None
    assert expected.lse is not None
    assert found.lse.dtype == (torch.float64 if own == torch.float64 else torch.float32)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("average", [True, False])
def test_torchs_attention_weights(layer_client: Client, models: Models, average: bool) -> None:
    """For a padded batch; torch gets the padding as its own mask."""
    x, z = torch.randn(3, 5, 24).double(), torch.randn(3, 6, 10).double()
    ends = torch.tensor([6, 2, 4])
    module = models.modules["attention/over"]
    expected, weights = module(
        *(each.transpose(0, 1) for each in (x, z, z)),
        key_padding_mask=torch.arange(6) >= ends[:, None],
        average_attn_weights=average,
    )
    found = layer_client.apply(
        "attention/over", x, context=z, context_lengths=ends, return_scores="weights", average_scores=average
    )
    assert found.scores is not None
    assert found.scores.shape == ((3, 5, 6) if average else (3, HEADS, 5, 6))
    assert_near(found.output, expected.transpose(0, 1), 1e-12)
    assert_near(found.scores, weights, 1e-12)


@pytest.mark.parametrize("name", ["encoder/relu/post", "bert"])
def test_a_mask_of_every_self_attention(layer_client: Client, models: Models, name: str) -> None:
    """A mask has the same effect as lengths."""
    layer = CHECKPOINTS[name]
    x, length = sequences(layer, [9])[0], 6
    found = layer_client.apply(name, x[None], mask=torch.arange(9)[None, None, None] < length).output[0, :length]
    assert_near(found, references(layer, models.modules[name], [x[:length]], None), layer.tolerance)


def test_a_whole_transformer_step_by_step(layer_client: Client, models: Models) -> None:
    """An encoder, then a decoder over its output: prefixes of the target give prefixes of the output."""
    source, target = torch.randn(9, 24).double(), torch.randn(5, 24).double()
    memory = layer_client.apply("encoder/stack", source).output
    whole = layer_client.apply("decoder/stack", target, context=memory).output
    encoder, decoder = models.modules["encoder/stack"], models.modules["decoder/stack"]
    expected = CHECKPOINTS["decoder/stack"].reference(decoder, target, encoder(source[None])[0])
    assert_near(whole, expected, 1e-11)
    for length in range(1, 5):
        assert_near(layer_client.apply("decoder/stack", target[:length], context=memory).output, whole[:length], 1e-11)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_of_a_later_part(layer_client: Client, name: str) -> None:
    """`query_offset` is the position where a sequence begins: a part of it is embedded as at its place.

    The one token at position p attends to itself alone. With learned positions its output depends on p; with rotary
    ones it does not, since only distances count.
    """
    ids = torch.full((6, 1), 9)
    found = layer_client.apply(name, ids, query_offset=range(6)).output[:, 0]
    alone = torch.cat([layer_client.apply(name, ids[0], query_offset=p).output for p in range(6)])
    assert_same_bits(found.numpy(), alone.numpy(), name)
    changes = (found[1:] - found[:-1]).abs().amax(-1)
    assert (changes > 1e-3).all() if name == "gpt2" else (changes < 1e-9).all()


def test_segments(layer_client: Client, models: Models) -> None:
    ids, segments = torch.randint(VOCABULARY, (2, 8)), torch.randint(2, (2, 8))
    expected = models.modules["bert"](ids, token_type_ids=segments).last_hidden_state
    found = layer_client.apply("bert", ids, segments=segments).output
    assert_near(found, expected, 1e-11)
    assert (bits(found.numpy()) != bits(layer_client.apply("bert", ids).output.numpy())).any()
