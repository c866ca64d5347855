"""The tensor names and conventions of published checkpoints.

In: a preset's name, the tensors of a checkpoint, and the block's number if one of several is asked for. Out: for each
canonical parameter the tensor that it comes from, and the options that the convention fixes. docs/layers.md lists the
presets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from attnserve_server.layers.pretrained_config import Family
from attnserve_server.layers.sources import Reference, TensorInfo, numbered


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a convention keeps a parameter: the first of these that a checkpoint has. It may be absent if optional."""

    references: tuple[Reference, ...]
    optional: bool = False


Origins = Mapping[str, Origin]


@dataclass(frozen=True, slots=True)
class Preset:
    """A convention. In canonical names and tensor names `{n}` is a block's number.

    `roots`: possible prefixes of all tensor names. `claims`: the names after a root that belong to the layer. If a
    tensor of such a name is not used, the model computes something else; unless it is one of `buffers`, which hold no
    parameters. `itself`: the layer is a self-attention, with one width throughout.
    """

    kind: Literal["multi_head", "transformer"]
    origins: Origins
    claims: str
    roots: tuple[str, ...] = ("",)
    buffers: str = r"(?!)"
    options: Mapping[str, Any] = field(default_factory=dict)
    family: Family | None = None
    itself: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether it knows the tensors of numbered blocks."""
        return any("{n}" in origin.references[0].tensor for origin in self.origins.values())

    @property
    def many(self) -> bool:
        """Whether it is a stack of blocks; otherwise, if there are blocks, it describes one of them."""
        return self.kind == "transformer" and self.has_blocks

    def root(self, tensors: Mapping[str, TensorInfo]) -> str:
        """The prefix of the names in a checkpoint with these tensors."""
        return next((root for root in self.roots if any(self.claimed(tensors, root))), self.roots[0])

    def claimed(self, tensors: Mapping[str, TensorInfo], root: str) -> Iterator[tuple[str, int | None]]:
        """The tensors that belong to the layer by their names, each with the number of its block."""
        pattern = re.compile(re.escape(root) + f"(?:{self.claims})")
        for name in tensors:
            if (match := pattern.fullmatch(name)) and not re.fullmatch(self.buffers, name.removeprefix(root)):
                number = match.groupdict().get("n")
                yield name, None if number is None else int(number)

    def unused(self, tensors: Mapping[str, TensorInfo], root: str, used: set[str], numbers: range) -> Iterator[str]:
        """The tensors that belong to the layer by their names, in blocks with these numbers, but are not used."""
        for name, number in self.claimed(tensors, root):
            if name not in used and (number is None or number in numbers):
                yield name

    def references(self, tensors: Mapping[str, TensorInfo], root: str, numbers: range) -> dict[str, Reference]:
        """The canonical parameters of the layer, or of all its blocks with these numbers.

        The result includes missing ones, unless they are optional and missing from all blocks.
        """
        references: dict[str, Reference] = {}
        for canonical, origin in self.origins.items():
            choices = [reference.behind(root) for reference in origin.references]
            each = numbers if "{n}" in choices[0].tensor else range(1)
            found = {n: _first_of([choice.numbered(n) for choice in choices], tensors) for n in each}
            if origin.optional and not any(found.values()):
                continue
            for n, reference in found.items():
                references[numbered(canonical, n)] = reference or choices[0].numbered(n)
        return references


def _first_of(references: list[Reference], tensors: Mapping[str, TensorInfo]) -> Reference | None:
    return next((reference for reference in references if reference.tensor in tensors), None)


def _weight(canonical: str, tensor: str, *, transposed: bool = False, part: tuple[int, int] | None = None) -> Origins:
    return {canonical + ".weight": Origin((Reference(tensor + ".weight", transposed, part=part),))}


def _bias(canonical: str, tensor: str, *, optional: bool = False, part: tuple[int, int] | None = None) -> Origins:
    return {canonical + ".bias": Origin((Reference(tensor + ".bias", part=part),), optional)}


def _linear(canonical: str, tensor: str, *, optional_bias: bool = False) -> Origins:
    return {**_weight(canonical, tensor), **_bias(canonical, tensor, optional=optional_bias)}


def _bert_norm(canonical: str, tensor: str) -> Origins:
    """BERT's norms; the first models' files, such as bert-base-uncased, have TensorFlow's names."""
    names = {"weight": "gamma", "bias": "beta"}
    return {
        f"{canonical}.{name}": Origin((Reference(f"{tensor}.{name}"), Reference(f"{tensor}.{old}")))
        for name, old in names.items()
    }


def _conv1d(canonical: str, tensor: str, part: tuple[int, int] | None = None) -> Origins:
    """GPT-2's linear maps: the weight is [inputs, outputs]."""
    return {**_weight(canonical, tensor, transposed=True, part=part), **_bias(canonical, tensor, part=part)}


def _torch_attention(canonical: str, tensor: str) -> Origins:
    """nn.MultiheadAttention: one weight for all three projections, or three where their widths differ."""
    origins: dict[str, Origin] = {}
    for index, name in enumerate(("query", "key", "value")):
        fused = Reference(tensor + "in_proj_weight", part=(index, 3))
        origins[f"{canonical}{name}.weight"] = Origin((fused, Reference(f"{tensor}{name[0]}_proj_weight")))
        bias = Reference(tensor + "in_proj_bias", part=(index, 3))
        origins[f"{canonical}{name}.bias"] = Origin((bias,), optional=True)
    return {**origins, **_linear(canonical + "output", tensor + "out_proj", optional_bias=True)}


def _torch_block(canonical: str, tensor: str, *, decoder: bool) -> Origins:
    """nn.TransformerEncoderLayer and nn.TransformerDecoderLayer."""
    norms = ["self.norm", "cross.norm", "feed_forward.norm"] if decoder else ["self.norm", "feed_forward.norm"]
    origins = {**_torch_attention(canonical + "self.", tensor + "self_attn.")}
    if decoder:
        origins |= _torch_attention(canonical + "cross.", tensor + "multihead_attn.")
    for name, linear in (("up", "linear1"), ("down", "linear2")):
        origins |= _linear(f"{canonical}feed_forward.{name}", tensor + linear, optional_bias=True)
    for index, norm in enumerate(norms, start=1):
        origins |= _linear(canonical + norm, f"{tensor}norm{index}", optional_bias=True)
    return origins


def _torch(*, decoder: bool, stack: bool) -> Preset:
    name = "decoder" if decoder else "encoder"
    parts = "self_attn|multihead_attn|linear1|linear2|norm[123]" if decoder else "self_attn|linear1|linear2|norm[12]"
    options = {"pre_norm": False, "norm.kind": "layer", "norm.epsilon": 1e-5, "activation": "relu", "causal": decoder}
    if not stack:
        origins = _torch_block("blocks.0.", "", decoder=decoder)
        return Preset("transformer", origins, rf"({parts})\..*", options=options)
    final = {key: Origin(origin.references, optional=True) for key, origin in _linear("norm", "norm").items()}
    origins = {**_torch_block("blocks.{n}.", "layers.{n}.", decoder=decoder), **final}
    return Preset("transformer", origins, r"layers\.(?P<n>\d+)\..*|norm\..*", ("", name + "."), options=options)


_BERT_BLOCK: Final = "encoder.layer.{n}."
_BERT: Final = Preset(
    kind="transformer",
    origins={
        **_weight("embedding.token", "embeddings.word_embeddings"),
        **_weight("embedding.position", "embeddings.position_embeddings"),
        **_weight("embedding.segment", "embeddings.token_type_embeddings"),
        **_bert_norm("embedding.norm", "embeddings.LayerNorm"),
        **_linear("blocks.{n}.self.query", _BERT_BLOCK + "attention.self.query"),
        **_linear("blocks.{n}.self.key", _BERT_BLOCK + "attention.self.key"),
        **_linear("blocks.{n}.self.value", _BERT_BLOCK + "attention.self.value"),
        **_linear("blocks.{n}.self.output", _BERT_BLOCK + "attention.output.dense"),
        **_bert_norm("blocks.{n}.self.norm", _BERT_BLOCK + "attention.output.LayerNorm"),
        **_linear("blocks.{n}.feed_forward.up", _BERT_BLOCK + "intermediate.dense"),
        **_linear("blocks.{n}.feed_forward.down", _BERT_BLOCK + "output.dense"),
        **_bert_norm("blocks.{n}.feed_forward.norm", _BERT_BLOCK + "output.LayerNorm"),
    },
    claims=r"embeddings\..*|encoder\.layer\.(?P<n>\d+)\..*",
    roots=("", "bert."),
    buffers=r"embeddings\.(position_ids|token_type_ids)",
    options={"pre_norm": False, "norm.kind": "layer", "norm.epsilon": 1e-12, "activation": "gelu"},
    family="bert",
)
_GPT2: Final = Preset(
    kind="transformer",
    origins={
        **_weight("embedding.token", "wte"),
        **_weight("embedding.position", "wpe"),
        **_linear("blocks.{n}.self.norm", "h.{n}.ln_1"),
        **_conv1d("blocks.{n}.self.query", "h.{n}.attn.c_attn", part=(0, 3)),
        **_conv1d("blocks.{n}.self.key", "h.{n}.attn.c_attn", part=(1, 3)),
        **_conv1d("blocks.{n}.self.value", "h.{n}.attn.c_attn", part=(2, 3)),
        **_conv1d("blocks.{n}.self.output", "h.{n}.attn.c_proj"),
        **_linear("blocks.{n}.feed_forward.norm", "h.{n}.ln_2"),
        **_conv1d("blocks.{n}.feed_forward.up", "h.{n}.mlp.c_fc"),
        **_conv1d("blocks.{n}.feed_forward.down", "h.{n}.mlp.c_proj"),
        **_linear("norm", "ln_f"),
    },
    claims=r"wte\..*|wpe\..*|ln_f\..*|h\.(?P<n>\d+)\..*",
    roots=("", "transformer."),
    # Old files contain the causal mask.
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    options={
        "pre_norm": True,
        "norm.kind": "layer",
        "norm.epsilon": 1e-5,
        "activation": "gelu_tanh",
        "causal": True,
    },
    family="gpt2",
)
_LLAMA_BLOCK: Final = "layers.{n}."
_LLAMA: Final = Preset(
    kind="transformer",
    origins={
        **_weight("embedding.token", "embed_tokens"),
        **_weight("blocks.{n}.self.norm", _LLAMA_BLOCK + "input_layernorm"),
        **_linear("blocks.{n}.self.query", _LLAMA_BLOCK + "self_attn.q_proj", optional_bias=True),
        **_linear("blocks.{n}.self.key", _LLAMA_BLOCK + "self_attn.k_proj", optional_bias=True),
        **_linear("blocks.{n}.self.value", _LLAMA_BLOCK + "self_attn.v_proj", optional_bias=True),
        **_linear("blocks.{n}.self.output", _LLAMA_BLOCK + "self_attn.o_proj", optional_bias=True),
        **_weight("blocks.{n}.feed_forward.norm", _LLAMA_BLOCK + "post_attention_layernorm"),
        **_linear("blocks.{n}.feed_forward.gate", _LLAMA_BLOCK + "mlp.gate_proj", optional_bias=True),
        **_linear("blocks.{n}.feed_forward.up", _LLAMA_BLOCK + "mlp.up_proj", optional_bias=True),
        **_linear("blocks.{n}.feed_forward.down", _LLAMA_BLOCK + "mlp.down_proj", optional_bias=True),
        **_weight("norm", "norm"),
    },
    claims=r"embed_tokens\..*|norm\..*|layers\.(?P<n>\d+)\..*",
    roots=("", "model."),
    buffers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    # The rotary base and the norms' epsilon differ between models: a config or the definition gives them.
    options={"pre_norm": True, "norm.kind": "rms", "activation": "silu", "causal": True, "rotary": True},
    family="llama",
)
_OF_ATTENTION: Final = ("causal", "rotary")
"""The options of a transformer that belong to its attention."""


def _attention_of(preset: Preset, claims: str) -> Preset:
    """The self-attention of one block, without the norm and the residual connection around it."""
    scope = "blocks.{n}.self."
    return Preset(
        kind="multi_head",
        origins={
            name.removeprefix(scope): origin
            for name, origin in preset.origins.items()
            if name.startswith(scope) and not name.startswith(scope + "norm.")
        },
        claims=claims,
        roots=preset.roots,
        buffers=preset.buffers,
        options={key: value for key, value in preset.options.items() if key in _OF_ATTENTION},
        family=preset.family,
        itself=True,
    )


PRESETS: Final[Mapping[str, Preset]] = {
    # Any other tensors may lie beside torch's attention; these two belong to it and are not supported.
    "torch.multihead_attention": Preset("multi_head", _torch_attention("", ""), "bias_k|bias_v"),
    "torch.transformer_encoder_layer": _torch(decoder=False, stack=False),
    "torch.transformer_decoder_layer": _torch(decoder=True, stack=False),
    "torch.transformer_encoder": _torch(decoder=False, stack=True),
    "torch.transformer_decoder": _torch(decoder=True, stack=True),
    "bert": _BERT,
    "bert.attention": _attention_of(_BERT, r"encoder\.layer\.(?P<n>\d+)\.attention\.(self\..*|output\.dense\..*)"),
    "gpt2": _GPT2,
    "gpt2.attention": _attention_of(_GPT2, r"h\.(?P<n>\d+)\.attn\..*"),
    "llama": _LLAMA,
    "llama.attention": _attention_of(_LLAMA, r"layers\.(?P<n>\d+)\.self_attn\..*"),
}
"""The presets by name."""
