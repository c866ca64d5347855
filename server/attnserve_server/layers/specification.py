"""What a layer is, apart from its weights: plain, frozen, checked values, without torch.

Parameters have canonical names, which a specification lists with their shapes. Linear maps are [outputs, inputs], as in
torch's `nn.Linear`: y = x W^T + b. Notation: H heads, Hk key/value heads, D and Dv their widths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "float64"]
Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "silu"]
LayerKind: TypeAlias = Literal["multi_head", "single_head", "additive", "general", "transformer"]
"""What a layer is, as `layers.toml` says it."""
NormKind: TypeAlias = Literal["layer", "rms"]

ITEM_BYTES: Final[Mapping[Dtype, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021) of queries and keys.

    The first `width` of a head's dimensions are rotated, in pairs (i, i + width/2), or (2i, 2i + 1) if `interleaved`;
    pair i of position p by the angle p * base^(-2i/width).
    """

    width: int
    base: float
    interleaved: bool = False
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head attention: query.weight [H D, inputs], key.weight [Hk D, contexts], value.weight [Hk Dv, contexts],
    output.weight [outputs, H Dv] or absent (the heads side by side), each with a bias or without.

    `alibi` has the slopes, one per head, or is empty. `scale` None is 1/sqrt(D).
    """

    inputs: int
    contexts: int
    outputs: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output: bool = True
    output_bias: bool = False
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    alibi: tuple[float, ...] = ()
    rotary: Rotary | None = None

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {
            "query.weight": (self.heads * self.head_dim, self.inputs),
            "key.weight": (self.kv_heads * self.head_dim, self.contexts),
            "value.weight": (self.kv_heads * self.value_dim, self.contexts),
        }
        if self.query_bias:
            shapes["query.bias"] = (self.heads * self.head_dim,)
        if self.key_bias:
            shapes["key.bias"] = (self.kv_heads * self.head_dim,)
        if self.value_bias:
            shapes["value.bias"] = (self.kv_heads * self.value_dim,)
        if self.output:
            shapes["output.weight"] = (self.outputs, self.heads * self.value_dim)
        if self.output_bias:
            shapes["output.bias"] = (self.outputs,)
        return {prefix + name: shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedScore:
    """Attention of one head by a learned score.

    `additive` (Bahdanau et al. 2015): query.weight [U, inputs], key.weight [U, contexts], bias [U] or absent,
    score.weight [U] or absent (the hidden units are summed). `general` (Luong et al. 2015): score.weight [inputs,
    contexts]. Values are the context itself, or value.weight [outputs, contexts] of it, with value.bias or without.
    `scale` None is 1.
    """

    score: Literal["additive", "general"]
    inputs: int
    contexts: int
    outputs: int
    units: int = 0
    bias: bool = False
    score_weight: bool = True
    value: bool = False
    value_bias: bool = False
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.score == "additive":
            shapes["query.weight"] = (self.units, self.inputs)
            shapes["key.weight"] = (self.units, self.contexts)
            if self.bias:
                shapes["bias"] = (self.units,)
            if self.score_weight:
                shapes["score.weight"] = (self.units,)
        else:
            shapes["score.weight"] = (self.inputs, self.contexts)
        if self.value:
            shapes["value.weight"] = (self.outputs, self.contexts)
        if self.value_bias:
            shapes["value.bias"] = (self.outputs,)
        return {prefix + name: shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """LayerNorm (weight [width], bias [width]) or RMSNorm (weight [width]); each parameter may be absent.

    `unit_offset`: the weight is stored as its difference from 1.
    """

    kind: NormKind
    width: int
    epsilon: float
    weight: bool = True
    bias: bool = True
    unit_offset: bool = False

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        names = [name for name, there in (("weight", self.weight), ("bias", self.bias)) if there]
        return {prefix + name: (self.width,) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) if `gated`.

    up.weight and gate.weight [hidden, width], down.weight [width, hidden], each with a bias or without.
    """

    width: int
    hidden: int
    activation: Activation
    gated: bool = False
    up_bias: bool = True
    down_bias: bool = True

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("up", "gate") if self.gated else ("up",):
            shapes[f"{name}.weight"] = (self.hidden, self.width)
            if self.up_bias:
                shapes[f"{name}.bias"] = (self.hidden,)
        shapes["down.weight"] = (self.width, self.hidden)
        if self.down_bias:
            shapes["down.bias"] = (self.width,)
        return {prefix + name: shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Self-attention, cross-attention over a context if there is one, and feed-forward; each with a residual connection
    and a norm before it (`pre_norm`: x + f(norm(x))) or after it (norm(x + f(x))). Only self-attention may have a
    rotary embedding.

    Parameters: self.*, self.norm.*, cross.*, cross.norm.*, feed_forward.*, feed_forward.norm.*.
    """

    self_attention: Attention
    cross_attention: Attention | None
    feed_forward: FeedForward
    norm: Norm
    pre_norm: bool

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        shapes = self.self_attention.shapes(prefix + "self.") | self.norm.shapes(prefix + "self.norm.")
        if self.cross_attention is not None:
            shapes |= self.cross_attention.shapes(prefix + "cross.") | self.norm.shapes(prefix + "cross.norm.")
        shapes |= self.feed_forward.shapes(prefix + "feed_forward.")
        return shapes | self.norm.shapes(prefix + "feed_forward.norm.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """What turns token ids into activations, or adds positions to activations.

    token.weight [vocabulary, width] if `vocabulary`, times `scale`; plus position.weight [positions, width] at
    `position_offset` + p if `positions`; plus sinusoids if `sinusoidal` (PE(p, 2i) = sin(p / 10000^(2i/width)),
    PE(p, 2i+1) = cos of the same; Vaswani et al. 2017); plus segment.weight [segments, width] if `segments`; then
    norm.* if there is a norm.
    """

    width: int
    vocabulary: int = 0
    scale: float = 1.0
    positions: int = 0
    position_offset: int = 0
    sinusoidal: bool = False
    segments: int = 0
    norm: Norm | None = None

    @property
    def end_of_positions(self) -> int | None:
        """One beyond the last position that has an embedding; None if every position has one."""
        return self.positions - self.position_offset if self.positions else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        tables = {"token": self.vocabulary, "position": self.positions, "segment": self.segments}
        shapes = {f"embedding.{name}.weight": (rows, self.width) for name, rows in tables.items() if rows}
        return shapes | (self.norm.shapes("embedding.norm.") if self.norm is not None else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A stack of equal blocks, optionally with an embedding before it and a norm after it.

    Parameters: embedding.*, blocks.N.*, norm.*.
    """

    blocks: int
    block: Block
    embedding: Embedding | None = None
    final_norm: Norm | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {} if self.embedding is None else self.embedding.shapes()
        for number in range(self.blocks):
            shapes |= self.block.shapes(f"blocks.{number}.")
        return shapes | (self.final_norm.shapes("norm.") if self.final_norm is not None else {})


Architecture: TypeAlias = Attention | LearnedScore | Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """Where a parameter's elements are: in a tensor of a safetensors file, in the rows from `start` to `stop` (all if
    None) after transposing it (if `transposed`).
    """

    tensor: str
    transposed: bool = False
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpecification:
    """A layer by its name: what it is, the dtype of its parameters on the device, and where they come from.

    `file` is relative to the model directory. `parameters` has a source for each name in `architecture.shapes()`.
    """

    name: str
    kind: LayerKind
    architecture: Architecture
    dtype: Dtype
    file: str
    parameters: Mapping[str, ParameterSource]

    def parameter_count(self) -> int:
        """How many elements its parameters have."""
        return sum(math.prod(shape) for shape in self.architecture.shapes().values())

    def parameter_bytes(self) -> int:
        """How many bytes its parameters take in its dtype."""
        return self.parameter_count() * ITEM_BYTES[self.dtype]
