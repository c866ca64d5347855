"""A layer's dimensions as its callers need them.

In: a specification. Out: an `Outline`, one flat table for all kinds of layers: what `layers check` prints and what
callers are told.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnserve_server.layers.specification import Attention, LayerSpecification, LearnedScore, Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Widths, heads and sizes of a layer. A width is 0 where the layer takes token ids, or no context.

    `head_dim` is the width of a query head (of the hidden units, for additive scores), `value_dim` that of a value head
    (of the values, for learned scores); `blocks`, `vocabulary` and `positions` are 0 where there are none.
    """

    input_width: int
    context_width: int
    output_width: int
    num_query_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int
    value_dim: int
    blocks: int = 0
    vocabulary: int = 0
    positions: int = 0
    causal: bool

    def __str__(self) -> str:
        inputs = f"ids below {self.vocabulary}" if self.vocabulary else str(self.input_width)
        context = f" over {self.context_width}" if self.context_width not in (0, self.input_width) else ""
        queries, keys = self.num_query_heads, self.num_kv_heads
        heads = f"{queries}/{keys}" if queries != keys else str(queries)
        blocks = f"{self.blocks} x " if self.blocks else ""
        causal = ", causal" if self.causal else ""
        width = f"{self.head_dim}/{self.value_dim}" if self.value_dim != self.head_dim else str(self.head_dim)
        return f"{inputs}{context} -> {self.output_width}, {blocks}{heads} heads x {width}{causal}"


def outline(specification: LayerSpecification) -> Outline:
    """The outline of a layer."""
    match specification.architecture:
        case Attention() as layer:
            return _outline_of_heads(layer)
        case LearnedScore() as layer:
            return Outline(
                input_width=layer.inputs,
                context_width=layer.contexts,
                output_width=layer.outputs,
                head_dim=layer.units or layer.inputs,
                value_dim=layer.outputs,
                causal=layer.causal,
            )
        case Transformer() as layer:
            heads, cross = _outline_of_heads(layer.block.self_attention), layer.block.cross_attention
            vocabulary = layer.embedding.vocabulary if layer.embedding is not None else 0
            positions = layer.embedding.end_of_positions if layer.embedding is not None else None
            return Outline(
                input_width=0 if vocabulary else heads.input_width,
                context_width=cross.contexts if cross is not None else 0,
                output_width=layer.block.feed_forward.width,
                num_query_heads=heads.num_query_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                value_dim=heads.value_dim,
                blocks=layer.blocks,
                vocabulary=vocabulary,
                positions=positions or 0,
                causal=heads.causal,
            )


def _outline_of_heads(layer: Attention) -> Outline:
    return Outline(
        input_width=layer.inputs,
        context_width=layer.contexts,
        output_width=layer.outputs,
        num_query_heads=layer.heads,
        num_kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        causal=layer.causal,
    )
