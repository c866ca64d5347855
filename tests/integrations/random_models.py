"""Tiny random transformers models, built from their config classes, and their results with eager attention and through
the service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.models.t5 import modeling_t5

from attnserve import Client
from attnserve.integrations.transformers import register

CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
"""What models call their cache, as an argument and in their outputs."""
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
BART_SIZES: dict[str, Any] = SIZES | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
T5_SIZES: dict[str, Any] = SIZES | {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
ENCODER_DECODER: dict[str, Callable[[], PreTrainedConfig]] = {
    "bart": lambda: transformers.BartConfig(**BART_SIZES, forced_eos_token_id=None),
    "t5": lambda: transformers.T5Config(**T5_SIZES),
}
needs_t5 = pytest.mark.skipif(
    not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"), reason="T5 attends by itself before transformers 5.18"
)
EVERY_ENCODER_DECODER = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_t5) if name == "t5" else name for name in ENCODER_DECODER]
)
OWN_ATTENTION: dict[str, Callable[[], PreTrainedConfig]] = {
    "mpnet": lambda: transformers.MPNetConfig(
        **SIZES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "bloom": lambda: transformers.BloomConfig(**SIZES, hidden_size=32, n_layer=2, n_head=4),
    "deberta_v2": lambda: transformers.DebertaV2Config(
        **SIZES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "bigbird_pegasus": lambda: transformers.BigBirdPegasusConfig(**BART_SIZES, attention_type="original_full"),
}


class Recorder:
    """Forwards calls to a client and records their arguments."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.calls: list[dict[str, Any]] = []

    def attend(self, query: Tensor, *states: Tensor, **options: Any) -> Any:
        """`states` are key and value, or none if they are resident."""
        stated = {name: option for name, option in options.items() if option is not None}
        self.calls.append(stated | {"query": query} | dict(zip(("key", "value"), states, strict=bool(states))))
        return self.client.attend(query, *states, **options)

    @property
    def caches(self) -> Any:
        return self.client.caches

    def create_cache(self, *sizes: int, **options: Any) -> Any:
        return self.client.create_cache(*sizes, **options)


@pytest.fixture
def recorder(client: Client) -> Iterator[Recorder]:
    recorder = Recorder(client)
    register(recorder)  # type: ignore[arg-type]
    yield recorder
    register(client)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
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
    """The model's results with eager attention and through the service."""
    outputs = []
    for implementation in ("eager", "attnserve"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        outputs.append(model(**inputs))
    return outputs[0], outputs[1]


def generated(model: PreTrainedModel, cache: Cache | None = None, **inputs: Any) -> list[Tensor]:
    """The tokens found without sampling with eager attention, and through the service with a cache, if one is given."""
    model.set_attn_implementation("eager")
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=6)
    model.set_attn_implementation("attnserve")
    return [expected, model.generate(**inputs, do_sample=False, max_new_tokens=6, **{CACHE: cache})]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def padding(side: str, batch: int, length: int) -> Tensor | None:
    """An attention mask with a different amount of padding in each row; the last row has none."""
    if side == "none":
        return None
    lengths = length - 2 * torch.arange(batch - 1, -1, -1)[:, None]
    mask = (torch.arange(length) < lengths).long()
    return mask if side == "right" else mask.flip(1)


def prompts(side: str) -> dict[str, Tensor]:
    """Two prompts of 7 tokens, the first of which may be padded, as a model takes them."""
    ids, mask = tokens(2, 7), padding(side, 2, 7)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}


def assert_same(expected: Tensor, actual: Tensor, mask: Tensor | None = None, *, tolerance: float = TOLERANCE) -> None:
    assert expected.shape == actual.shape
    difference = (expected - actual).abs()
    if mask is not None:
        difference = difference[mask.bool()]
    assert difference.numel()
    assert difference.max().item() < tolerance
