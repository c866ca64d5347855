"""The attention function that transformers calls: how it treats the models' arguments, and what it rejects."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from random_models import (
    BERT,
    Recorder,
    assert_same,
    build,
    no_gradients,
    recorder,
    tokens,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel

from attnserve import AsyncClient, Client
from attnserve.integrations.transformers import ResidentCache, forward_mask, register

__all__ = ["no_gradients", "recorder"]


def attention_function(*tensors: Tensor, mask: Tensor | None = None, **arguments: Any) -> Tensor:
    """The output `[B, Lq, H, D]` of the registered function, called as a model calls it."""
    output, weights = transformers.AttentionInterface()["attnserve"](torch.nn.Module(), *tensors, mask, **arguments)
    assert weights is None
    assert output.is_contiguous()
    return output


def reference(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, **arguments: Any) -> Tensor:
    """The same with torch's own attention."""
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, **arguments).transpose(1, 2)


def test_one_set_of_queries_for_a_batch(recorder: Recorder) -> None:
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    expected = reference(query.expand(2, -1, -1, -1), key, value, scale=0.5)
    assert_same(expected, attention_function(query, key, value, scaling=0.5))


def test_position_bias_joins_an_additive_mask(recorder: Recorder) -> None:
    query, bias, mask = torch.randn(2, 4, 5, 8), torch.randn(1, 4, 5, 5), torch.randn(2, 1, 5, 5)
    expected = reference(query, query, query, bias + mask)
    assert_same(expected, attention_function(query, query, query, mask=mask, position_bias=bias))


def test_a_mask_longer_than_the_keys(recorder: Recorder) -> None:
    """Both a caller's mask and one whose pattern is known but is for other keys."""
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8)
    mask = torch.rand(1, 1, 3, 9) < 0.7
    mask[..., 0] = True
    assert_same(reference(query, key, key, mask[..., :5]), attention_function(query, key, key, mask=mask))
    made = forward_mask(batch_size=1, q_length=3, kv_length=9, q_offset=6)
    assert made is not None
    assert_same(reference(query, key, key), attention_function(query, key, key, mask=made))
    assert "causal" not in recorder.calls[-1]  # the last of 3 queries is not at the last of 5 keys


def test_a_mask_has_the_dtype_of_the_scores_that_a_model_adds_it_to() -> None:
    made = forward_mask(batch_size=1, q_length=3, kv_length=3, q_offset=0, dtype=torch.float16)
    assert made is not None
    assert made.dtype == torch.float16
    assert made.min() == torch.finfo(torch.float16).min


def test_an_additive_mask_of_integers(recorder: Recorder) -> None:
    query, mask = torch.randn(1, 4, 5, 8), torch.randint(-3, 3, (1, 1, 5, 5))
    assert_same(reference(query, query, query, mask.float()), attention_function(query, query, query, mask=mask))


def test_a_mask_that_is_the_same_for_all_keys(client: Client) -> None:
    """It fits resident keys, however many there are."""
    register(client)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8)
    with ResidentCache(client, transformers.LlamaConfig(num_hidden_layers=1)) as cache:
        output = attention_function(query, *cache.update(key, value, 0), mask=torch.zeros(1, 1, 3, 1))
    assert_same(reference(query, key, value), output)


def test_expanded_masks_travel_unexpanded(recorder: Recorder) -> None:
    query = torch.randn(3, 4, 5, 8)
    mask = torch.tensor([True, False, True, True, False]).expand(3, 1, 5, 5)
    assert_same(reference(query, query, query, mask), attention_function(query, query, query, mask=mask))
    assert recorder.calls[0]["mask"].shape == (1, 1, 1, 5)


def test_causal_without_a_mask(recorder: Recorder) -> None:
    """As the text towers of some models request it; a single query attends to all keys."""
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8)
    assert_same(reference(query, key, key, is_causal=True), attention_function(query, key, key, is_causal=True))
    last = query[:, :, -1:]
    assert_same(reference(last, key, key), attention_function(last, key, key, is_causal=True))


@pytest.mark.parametrize("masked", ["nothing", "causal", "padding", "bias"])
def test_keys_that_the_model_chooses_for_each_query(recorder: Recorder, masked: str) -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    indices = torch.rand(2, 5, 5).topk(3).indices.int()
    indices[..., 0] = 1  # so that no query is left without keys
    allowed = torch.zeros(2, 1, 5, 5, dtype=torch.bool).scatter(3, indices[:, None].long(), True)
    mask = None
    if masked == "causal":
        query = query[:, :, -4:]
        indices, allowed = indices[:, 1:], allowed[:, :, 1:]
        mask = forward_mask(batch_size=2, q_length=4, kv_length=5, q_offset=1)
        allowed &= torch.ones(4, 5, dtype=torch.bool).tril(1)
    elif masked == "padding":
        mask = torch.tensor([[True, True, True, True, False], [False, True, True, True, True]])[:, None, None]
        allowed &= mask
    elif masked == "bias":
        mask = torch.randn(2, 4, 5, 5)
    bias = torch.zeros(()) if masked != "bias" else mask
    expected = reference(query, key, key, bias + torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf))
    assert_same(expected, attention_function(query, key, key, mask=mask, indices=indices))


def test_autocast_gives_one_dtype(recorder: Recorder) -> None:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention_function(query, key, key)
    assert output.dtype == torch.bfloat16
    assert {recorder.calls[0][name].dtype for name in ("query", "key", "value")} == {torch.bfloat16}


def test_two_names_are_two_clients(client: Client) -> None:
    first, second = Recorder(client), Recorder(client)
    register(first, "first")  # type: ignore[arg-type]
    register(second, "second")  # type: ignore[arg-type]
    model = build(AutoModel, BERT)
    model.set_attn_implementation("second")
    model(tokens(1, 4))
    assert (len(first.calls), len(second.calls)) == (0, 2)


def test_a_client_that_does_not_wait_is_refused() -> None:
    with pytest.raises(TypeError, match="found AsyncClient"):
        register(AsyncClient("127.0.0.1:1"), "asyncio")  # type: ignore[arg-type]
    assert "asyncio" not in transformers.AttentionInterface()


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "paged|eager"])
def test_an_attention_of_transformers_is_not_replaced(client: Client, name: str) -> None:
    before = dict(transformers.AttentionInterface()), dict(transformers.AttentionMaskInterface())
    with pytest.raises(ValueError, match=f"^name: .*, found {re.escape(repr(name))}$"):
        register(client, name)
    assert (dict(transformers.AttentionInterface()), dict(transformers.AttentionMaskInterface())) == before


@pytest.mark.parametrize("name", ["", 3, None, b"attnserve"])
def test_a_name_is_text(client: Client, name: Any) -> None:
    with pytest.raises(TypeError, match=r"^name: expected text, not empty, found"):
        register(client, name)


def test_gradients_are_refused(recorder: Recorder) -> None:
    model = build(AutoModel, BERT)
    model.set_attn_implementation("attnserve")
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(tokens(1, 4))
    assert not recorder.calls


@pytest.mark.parametrize(("argument", "shape"), [("position_bias", (1, 2, 3, 3)), ("s_aux", (2,))])
def test_gradients_of_whatever_else_has_them_are_refused(
    recorder: Recorder, argument: str, shape: tuple[int, ...]
) -> None:
    query, learned = torch.randn(1, 2, 3, 4), torch.randn(shape, requires_grad=True)
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        attention_function(query, query, query, **{argument: learned})
    attention_function(query, query, query, **{argument: learned})
    assert len(recorder.calls) == 1


def test_dropout_is_refused_in_training_only(recorder: Recorder) -> None:
    model = build(AutoModel, BERT)
    model.set_attn_implementation("attnserve")
    with pytest.raises(ValueError, match=r"no dropout.*model\.eval"):
        model.train()(tokens(1, 4))
    assert not recorder.calls
    attention = transformers.AttentionInterface()["attnserve"]
    query = torch.randn(1, 2, 3, 4)
    attention(torch.nn.Module().eval(), query, query, query, None, dropout=0.1)
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("argument", ["cache", "sinks", "block_indices"])
def test_what_is_not_supported_says_so(recorder: Recorder, argument: str) -> None:
    attention = transformers.AttentionInterface()["attnserve"]
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError):
        attention(torch.nn.Module(), query, query, query, None, **{argument: object()})
    assert not recorder.calls
