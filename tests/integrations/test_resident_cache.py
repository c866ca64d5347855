"""transformers models whose keys and values are in the service: the same tokens and logits as with eager attention and
a cache of transformers', and no key is sent twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from random_models import (
    CACHE,
    CAUSAL,
    ENCODER_DECODER,
    EVERY_ENCODER_DECODER,
    LLAMA_SIZES,
    T5_SIZES,
    VOCABULARY,
    Recorder,
    assert_same,
    build,
    generated,
    needs_t5,
    no_gradients,
    padding,
    prompts,
    recorder,
    tokens,
)
from resident_models import client, llama, locally, nothing_left
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, EncoderDecoderCache, PreTrainedModel

from attnserve import Client
from attnserve.integrations.transformers import ResidentCache, register

__all__ = ["client", "llama", "no_gradients", "nothing_left", "recorder"]


def sent(recorder: Recorder) -> list[int]:
    """The number of keys in each call."""
    lengths = []
    for call in recorder.calls:
        axis = 1 if call["layout"] == "length_first" else 2
        lengths.append(call["key"].shape[axis] if "key" in call else 0)
    return lengths


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation(recorder: Recorder, name: str, side: str) -> None:
    """Sliding windows, softcaps, sinks and padding included; the windows are shorter than the text."""
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    with ResidentCache(recorder, model.config) as cache:  # type: ignore[arg-type]
        expected, actual = generated(model, cache, **prompts(side))
        assert cache.get_seq_length() == 12
        assert [info.lengths for info in recorder.client.caches.list()] == [(12, 12)] * 2
    assert torch.equal(expected, actual)
    assert sent(recorder) == [7, 7] + 2 * 5 * [1]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_beam_search(client: Client, name: str) -> None:
    register(client)
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    with ResidentCache(client, model.config) as cache:
        expected, actual = generated(model, cache, input_ids=tokens(2, 7), num_beams=3)
        assert len(client.caches.list()) == 6
    assert torch.equal(expected, actual)


def test_guessed_tokens_are_taken_back(recorder: Recorder) -> None:
    """Speculative decoding: the prompt repeats itself, so there are guesses; most of them are wrong."""
    model = build(AutoModelForCausalLM, CAUSAL["mistral"]())
    ids = tokens(1, 4).repeat(1, 3)
    with ResidentCache(recorder, model.config) as cache:  # type: ignore[arg-type]
        expected, actual = generated(model, cache, input_ids=ids, prompt_lookup_num_tokens=3, eos_token_id=VOCABULARY)
        length = cache.get_seq_length()
    assert torch.equal(expected, actual)
    assert length == actual.shape[1] - 1
    assert sum(sent(recorder)) > 2 * length  # there were wrong guesses


@pytest.mark.parametrize("beams", [1, 3])
@EVERY_ENCODER_DECODER
def test_encoder_and_decoder(recorder: Recorder, name: str, beams: int) -> None:
    """What the encoder found is sent once for each layer."""
    model = build(AutoModelForSeq2SeqLM, ENCODER_DECODER[name]())
    own, cross = (ResidentCache(recorder, model.config) for _ in range(2))  # type: ignore[arg-type]
    with own, cross:
        expected, actual = generated(
            model,
            EncoderDecoderCache(own, cross),
            input_ids=tokens(2, 7),
            attention_mask=padding("right", 2, 7),
            num_beams=beams,
        )
        assert (own.get_seq_length(), cross.get_seq_length()) == (6, 7)
    assert torch.equal(expected, actual)
    assert sorted(sent(recorder)) == 2 * 5 * [0] + 2 * 6 * [1] + (2 + 2) * [7]


def test_guesses_of_a_model_with_an_encoder(client: Client) -> None:
    register(client)
    model = build(AutoModelForSeq2SeqLM, ENCODER_DECODER["bart"]())
    with ResidentCache(client, model.config) as own, ResidentCache(client, model.config) as cross:
        pair, ids = EncoderDecoderCache(own, cross), tokens(1, 4).repeat(1, 3)
        expected, actual = generated(model, pair, input_ids=ids, prompt_lookup_num_tokens=3, eos_token_id=VOCABULARY)
        assert own.get_seq_length() == actual.shape[1] - 1
    assert torch.equal(expected, actual)


@needs_t5
def test_a_decoder_deeper_than_its_encoder(client: Client) -> None:
    register(client)
    model = build(AutoModelForSeq2SeqLM, transformers.T5Config(**{**T5_SIZES, "num_decoder_layers": 3}))
    inputs = {"input_ids": tokens(2, 7), "decoder_input_ids": tokens(2, 4)}
    expected = model(**inputs, use_cache=False).logits
    model.set_attn_implementation("attnserve")
    with ResidentCache(client, model.config) as own, ResidentCache(client, model.config) as cross:
        actual = model(**inputs, **{CACHE: EncoderDecoderCache(own, cross)}).logits
        assert {info.layers for info in client.caches.list()} == {3}
    assert_same(expected, actual, tolerance=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prefill_in_chunks(recorder: Recorder, name: str) -> None:
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    ids = tokens(2, 12)
    expected = locally(model, ids)
    with ResidentCache(recorder, model.config) as cache:  # type: ignore[arg-type]
        logits = [model(chunk, **{CACHE: cache}).logits for chunk in ids.split([3, 4, 1, 4], dim=1)]
    assert_same(expected, torch.cat(logits, dim=1))
    assert sent(recorder) == [3, 3, 4, 4, 1, 1, 4, 4]
    assert not any("mask" in call or "query_offset" in call for call in recorder.calls if name == "llama")


def test_weights_of_a_step(client: Client, llama: PreTrainedModel) -> None:
    ids = tokens(2, 6)
    llama.set_attn_implementation("eager")
    expected = llama(ids, output_attentions=True).attentions
    llama.set_attn_implementation("attnserve")
    with ResidentCache(client, llama.config) as cache:
        llama(ids[:, :5], **{CACHE: cache})
        actual = llama(ids[:, 5:], **{CACHE: cache}, output_attentions=True).attentions
    for layer_expected, layer_actual in zip(expected, actual, strict=True):
        assert_same(layer_expected[:, :, 5:], layer_actual)


def test_masks_of_the_caller(client: Client, llama: PreTrainedModel) -> None:
    """Such a mask has no pattern: it travels as it is."""
    ids = tokens(2, 9)
    allowed = (torch.rand(2, 1, 9, 9) < 0.5).tril() | torch.eye(9, dtype=torch.bool)
    bias = torch.zeros(2, 1, 9, 9).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = locally(llama, ids, attention_mask=bias)
    with ResidentCache(client, llama.config) as cache:
        first = llama(ids[:, :5], attention_mask=bias[:, :, :5, :5], **{CACHE: cache}).logits
        rest = llama(ids[:, 5:], attention_mask=bias[:, :, 5:], **{CACHE: cache}).logits
    assert_same(expected, torch.cat([first, rest], dim=1))


@pytest.mark.parametrize("fork", [ResidentCache.fork, copy.deepcopy])
def test_texts_that_begin_alike(
    client: Client, llama: PreTrainedModel, fork: Callable[[ResidentCache], ResidentCache]
) -> None:
    prompt, endings = tokens(1, 6), tokens(2, 3)
    with ResidentCache(client, llama.config) as shared:
        llama(prompt, **{CACHE: shared})
        for ending in endings[:, None]:
            with fork(shared) as cache:
                assert all(info.shared_bytes == info.bytes > 0 for info in client.caches.list())
                actual = llama(ending, **{CACHE: cache}).logits
                assert (shared.get_seq_length(), cache.get_seq_length()) == (6, 9)
            assert_same(locally(llama, torch.cat([prompt, ending], dim=1))[:, 6:], actual)
        shared.batch_repeat_interleave(2)
        actual = llama(endings, **{CACHE: shared}).logits
    assert_same(locally(llama, torch.cat([prompt.expand(2, -1), endings], dim=1))[:, 6:], actual)


def test_sequences_are_chosen(client: Client, llama: PreTrainedModel) -> None:
    ids, ending = tokens(3, 6), tokens(3, 1)
    chosen = torch.tensor([2, 0, 2])
    with ResidentCache(client, llama.config) as cache:
        llama(ids, **{CACHE: cache})
        cache.batch_select_indices(chosen)
        assert len(client.caches.list()) == 3
        actual = llama(ending, **{CACHE: cache}).logits
        assert_same(locally(llama, torch.cat([ids[chosen], ending], dim=1))[:, 6:], actual)
        cache.batch_select_indices(torch.tensor([True, False, False]))
        assert len(client.caches.list()) == 1
        with pytest.raises(ValueError, match="expected keys of as many sequences as before, 1, found 3"):
            llama(ending, **{CACHE: cache})
        with pytest.raises(IndexError):
            cache.batch_select_indices(torch.tensor([0, 1]))
        assert len(client.caches.list()) == 1


def test_crop(client: Client, llama: PreTrainedModel) -> None:
    ids = tokens(2, 9)
    expected = locally(llama, ids)
    with ResidentCache(client, llama.config) as cache:
        cache.crop(-1)
        assert (cache.get_seq_length(), cache.layers[1].keys) == (0, None)
        llama(ids.flip(1), **{CACHE: cache})
        for count, length in ((0, 9), (-2, 7), (5, 5), (-9, 0)):
            cache.crop(count)
            assert cache.get_seq_length() == length
            assert cache.layers[1].keys.shape == (2, 2, length, 8)
        llama(ids, **{CACHE: cache})
        cache.crop(-4)
        assert_same(expected[:, 5:], llama(ids[:, 5:], **{CACHE: cache}).logits)


def test_reset(client: Client, llama: PreTrainedModel) -> None:
    """A cache that was reset takes a batch of another size."""
    with ResidentCache(client, llama.config) as cache:
        for batch in (2, 3):
            ids = tokens(batch, 5)
            assert_same(locally(llama, ids), llama(ids, **{CACHE: cache}).logits)
            assert len(client.caches.list()) == batch
            cache.reset()
            assert (cache.get_seq_length(), client.caches.list()) == (0, ())


def test_reset_forgets_what_was_not_sent(client: Client) -> None:
    with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
        cache.update(*torch.randn(2, 2, 2, 5, 8), 0)
        cache.reset()
        assert cache.get_seq_length() == 0
        keys, _ = cache.update(*torch.randn(2, 3, 2, 4, 8), 0)
        assert keys.shape == (3, 2, 4, 8)
        cache.update(*torch.randn(2, 3, 2, 4, 8), 0)
        assert [info.lengths for info in client.caches.list()] == [(4, 0)] * 3


def test_what_nobody_attends_to_is_kept_too(client: Client) -> None:
    """As with any cache, `update` alone adds tokens."""
    config = transformers.LlamaConfig(**LLAMA_SIZES)
    key, value = torch.randn(2, 2, 2, 7, 8)
    with ResidentCache(client, config) as cache:
        for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
            keys, values = cache.update(key[:, :, part], value[:, :, part], 0)
        assert keys.shape == values.shape == (2, 2, 7, 8)
        cache.crop(-1)
        assert cache.get_seq_length() == 6
        query = torch.randn(2, 4, 1, 8)
        output, _ = transformers.AttentionInterface()["attnserve"](
            torch.nn.Module(), query, cache.layers[0].keys, cache.layers[0].values, None
        )
        reference = torch.nn.functional.scaled_dot_product_attention(
            query, key[:, :, :6], value[:, :, :6], enable_gqa=True
        )
        assert_same(reference.transpose(1, 2), output)
        with pytest.raises(RuntimeError, match="expected attention to the 6 tokens in the cache, found 7"):
            transformers.AttentionInterface()["attnserve"](torch.nn.Module(), query, keys, values, None)


@pytest.mark.parametrize("change", ["fork", "reorder", "truncate"])
def test_what_is_not_sent_yet_takes_part(client: Client, change: str) -> None:
    """In forks, in reordering, and in truncation, which cuts off what was never sent."""
    register(client)
    config = transformers.LlamaConfig(**LLAMA_SIZES)
    key, value, query = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 4, 1, 8)
    with ResidentCache(client, config, ttl=50.0) as cache:
        cache.update(key[:, :, :3], value[:, :, :3], 0)
        cache.update(key[:, :, 3:], value[:, :, 3:], 0)  # which sends the first three
        order, length = [0, 1], 7
        used = cache
        if change == "fork":
            used = cache.fork()
            cache.crop(-7)
        elif change == "reorder":
            order = [1, 1]
            cache.reorder_cache(torch.tensor(order))
        else:
            length = 5
            cache.truncate(length)
            assert [info.lengths[0] for info in client.caches.list()] == [3, 3]
        with used:
            output, _ = transformers.AttentionInterface()["attnserve"](
                torch.nn.Module(), query, used.layers[0].keys, used.layers[0].values, None
            )
            assert {info.ttl for info in client.caches.list()} == {50.0}
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key[order, :, :length], value[order, :, :length], enable_gqa=True
        )
    assert_same(expected.transpose(1, 2), output)


def test_a_causal_model_without_a_mask(client: Client) -> None:
    """Its queries are aligned with the first keys, as they are with keys that are sent."""
    register(client)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 7, 8), torch.randn(1, 4, 7, 8)
    with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
        resident = cache.update(key, value, 0)
        outputs = [
            transformers.AttentionInterface()["attnserve"](torch.nn.Module(), query, *states, None, is_causal=True)[0]
            for states in (resident, (key, value))
        ]
    assert_same(outputs[1], outputs[0])


def test_sent_keys_do_not_stay_with_the_model(client: Client, llama: PreTrainedModel) -> None:
    with ResidentCache(client, llama.config) as cache:
        llama(tokens(2, 9), **{CACHE: cache})
        held = [layer._like for layer in cache.layers]
        assert {states.untyped_storage().nbytes() for pair in held for states in pair} == {0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(client: Client, llama: PreTrainedModel, dtype: torch.dtype) -> None:
    """The caches have the model's dtype."""
    ids = tokens(2, 9)
    exact = locally(llama, ids)
    llama.to(dtype)
    error = (locally(llama, ids) - exact).abs().max()
    with ResidentCache(client, llama.config) as cache:
        logits = [llama(chunk, **{CACHE: cache}).logits for chunk in ids.split(3, dim=1)]
        assert {info.dtype for info in client.caches.list()} == {str(dtype).removeprefix("torch.")}
    assert (torch.cat(logits, dim=1) - exact).abs().max() <= 2 * error + 1e-5


def test_a_dtype_of_its_own(client: Client, llama: PreTrainedModel) -> None:
    ids = tokens(2, 9)
    expected = locally(llama.double(), ids)
    with (
        ResidentCache(client, llama.config) as cache,
        pytest.raises(NotImplementedError, match=r"stores torch\.float64"),
    ):
        llama(ids, **{CACHE: cache})
    with ResidentCache(client, llama.config, dtype="float32") as cache:
        assert_same(expected, llama(ids, **{CACHE: cache}).logits, tolerance=1e-5)
        with cache.fork() as fork:
            fork.reset()
            fork.update(*torch.randn(2, 2, 2, 5, 8, dtype=torch.float64), 0)
            assert {info.dtype for info in client.caches.list()} == {"float32"}


def test_autocast(client: Client, llama: PreTrainedModel) -> None:
    ids = tokens(2, 9)
    exact = locally(llama, ids)
    with torch.autocast("cpu", torch.bfloat16):
        error = (locally(llama, ids) - exact).abs().max()
        with ResidentCache(client, llama.config) as cache:
            logits = [llama(chunk, **{CACHE: cache}).logits for chunk in ids.split(3, dim=1)]
    assert 0 < (torch.cat(logits, dim=1) - exact).abs().max() <= 2 * error + 1e-5


def test_one_sequence_is_on_one_server(start_server: Callable[..., Any], llama: PreTrainedModel) -> None:
    """A client of several servers makes caches on all of them, but all of a batch on one."""
    addresses = [start_server().address for _ in range(2)]
    with Client(f"ipv4:{','.join(addresses)}") as client:
        ids = tokens(3, 5)
        expected = locally(llama, ids)
        with ResidentCache(client, llama.config) as one, ResidentCache(client, llama.config) as other:
            for cache in (one, other):
                assert_same(expected, llama(ids, **{CACHE: cache}).logits)
            assert len(client.caches.list()) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_model_on_a_gpu(recorder: Recorder) -> None:
    model = build(AutoModelForCausalLM, CAUSAL["gpt_oss"]()).cuda()
    ids, mask = tokens(2, 7).cuda(), padding("left", 2, 7)
    with ResidentCache(recorder, model.config) as cache:  # type: ignore[arg-type]
        expected, actual = generated(model, cache, input_ids=ids, attention_mask=mask.cuda())
    assert torch.equal(expected, actual)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # from torch, only there
def test_compiled_model(recorder: Recorder, llama: PreTrainedModel) -> None:
    """The compiled graph breaks where the cache is asked."""
    ids = tokens(2, 7)
    expected = locally(llama, ids)
    compiled = torch.compile(llama, backend="eager")
    with ResidentCache(recorder, llama.config) as cache:  # type: ignore[arg-type]
        logits = [compiled(chunk, **{CACHE: cache}).logits for chunk in ids.split([4, 1, 1, 1], dim=1)]
    assert_same(expected, torch.cat(logits, dim=1), tolerance=1e-4)
