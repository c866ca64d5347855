"""What a layer is, inferred from its definition and from the shapes of its tensors.

In: the kind, the options (`heads`, `norm.epsilon`, ...: flat, by dotted name), the names of the parameters that the
layer has, and the shapes of those that the file has. Out: the architecture. What the definition declares is taken on
trust: `checkpoint.defects_of` finds out whether the tensors agree. Uses neither torch nor files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, TypeAlias

from attnserve_server.layers.specification import (
    Architecture,
    Attention,
    Block,
    Embedding,
    FeedForward,
    LayerKind,
    LearnedScore,
    Norm,
    Rotary,
    Transformer,
)

Shape: TypeAlias = tuple[int, ...]


class UndeterminedError(Exception):
    """Something about a layer that follows neither from its definition nor from its tensors, or that is impossible."""

    def __init__(self, key: str, expected: str, found: object) -> None:
        super().__init__(f"{key}: expected {expected}, found {found}")
        self.key, self.expected, self.found = key, expected, str(found)


class UnknownLengthError(UndeterminedError):
    """A length that a missing tensor would have told."""

    def __init__(self, key: str) -> None:
        super().__init__(key, "a length, as no tensor of the file tells it", "nothing")


class UnevenRowsError(UndeterminedError):
    """A tensor's rows cannot be divided into heads."""

    def __init__(self, key: str, rows: int, name: str, divisor: int) -> None:
        super().__init__(key, f"a divisor of the {rows} rows of {name}", divisor)


class Evidence:
    """What is known of a layer: its options, the names of its parameters, the shapes of those that the file has."""

    def __init__(self, options: Mapping[str, Any], names: Collection[str], shapes: Mapping[str, Shape]) -> None:
        self.options, self.names, self.shapes = options, names, shapes

    def get(self, key: str, default: Any = None) -> Any:
        """An option, or the default where it is not declared."""
        return self.options.get(key, default)

    def required(self, key: str, expected: str) -> Any:
        """An option that cannot be inferred. Raises UndeterminedError."""
        if key not in self.options:
            raise UndeterminedError(key, f"{expected} (the shapes of the tensors do not tell)", "nothing")
        return self.options[key]

    def length(self, name: str, axis: int) -> int | None:
        """How long an axis of a parameter is in the file; None where there is no such parameter, axis or element."""
        shape = self.shapes.get(name, ())
        return shape[axis] or None if axis < len(shape) else None

    def elements(self, name: str) -> int | None:
        """How many elements a parameter has in the file, whatever its axes; None where there is no such parameter."""
        return math.prod(self.shapes[name]) or None if name in self.shapes else None

    def below(self, prefix: str) -> Evidence:
        """The same for the parameters whose names begin with a prefix, which is removed."""
        return Evidence(
            self.options,
            [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)],
            {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)},
        )


def build(
    kind: LayerKind, options: Mapping[str, Any], names: Collection[str], shapes: Mapping[str, Shape]
) -> Architecture:
    """The architecture of a layer. Raises UndeterminedError if it cannot be inferred."""
    evidence = Evidence(options, names, shapes)
    match kind:
        case "multi_head":
            return attention(evidence)
        case "single_head":
            return attention(Evidence({**options, "heads": 1, "kv_heads": 1}, names, shapes))
        case "additive" | "general":
            return learned_score(kind, evidence)
        case _:
            return transformer(evidence)


def parameters_of(kind: LayerKind) -> list[str]:
    """The parameters that layers of a kind can have, in the first of a transformer's blocks."""
    attention = Attention(
        inputs=1,
        contexts=1,
        outputs=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        value_dim=1,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
    )
    match kind:
        case "multi_head" | "single_head":
            return list(attention.shapes())
        case "additive" | "general":
            score = LearnedScore(
                score=kind, inputs=1, contexts=1, outputs=1, units=1, bias=True, value=True, value_bias=True
            )
            return list(score.shapes())
        case _:
            norm = Norm(kind="layer", width=1, epsilon=1.0)
            block = Block(
                self_attention=attention,
                cross_attention=attention,
                feed_forward=FeedForward(width=1, hidden=1, activation="relu", gated=True),
                norm=norm,
                pre_norm=True,
            )
            embedding = Embedding(width=1, vocabulary=1, positions=1, segments=1, norm=norm)
            return list(Transformer(blocks=1, block=block, embedding=embedding, final_norm=norm).shapes())


def known(key: str, *candidates: int | None) -> int:
    """The first length that is known. Raises UndeterminedError, naming the key that would declare it."""
    for candidate in candidates:
        if candidate is not None:
            return candidate
    raise UnknownLengthError(key)


def _quotient(key: str, rows: int, name: str, divisor: int) -> int:
    if rows % divisor:
        raise UnevenRowsError(key, rows, name, divisor)
    return rows // divisor


_HEADS: Final = ("heads", "kv_heads", "head_dim", "value_dim")


def attention(evidence: Evidence, width: int | None = None, contexts: int | None = None, scope: str = "") -> Attention:
    """Attention whose parameters are `query.weight` and so on; `width` and `contexts` if they are known already.

    The options of a cross-attention have a scope, `cross.`; its heads are those of the self-attention unless declared.
    """
    said = evidence.get
    own = any(scope + key in evidence.options for key in _HEADS)
    heads, kv_heads, head_dim, value_dim = (said((scope if own else "") + key) for key in _HEADS)
    if heads is None and head_dim is None:
        evidence.required(scope + "heads", "a number of heads")
    rows = evidence.length("query.weight", 0)
    if heads is None:
        heads = _quotient(scope + "head_dim", known(scope + "heads", rows), "query.weight", head_dim)
    key_rows = evidence.length("key.weight", 0)
    if head_dim is None:
        if rows is None and kv_heads is not None and key_rows is not None:
            head_dim = _quotient(scope + "kv_heads", key_rows, "key.weight", kv_heads)
        else:
            head_dim = _quotient(scope + "heads", known(scope + "head_dim", rows), "query.weight", heads)
    if kv_heads is None:
        kv_heads = heads if key_rows is None else _quotient(scope + "head_dim", key_rows, "key.weight", head_dim)
    if kv_heads < 1 or heads % kv_heads:
        raise UndeterminedError(scope + "kv_heads", f"a divisor of the {heads} query heads", kv_heads)
    if value_dim is None:
        value_rows = evidence.length("value.weight", 0)
        value_dim = head_dim
        if value_rows is not None:
            value_dim = _quotient(scope + "kv_heads", value_rows, "value.weight", kv_heads)
    output = "output.weight" in evidence.names
    joined = heads * value_dim
    if not output and width is not None and width != joined:
        expected = f"a map of the {joined} values of the heads to {width}"
        raise UndeterminedError(scope + "output.weight", expected, "none")
    return Attention(
        inputs=said("inputs") or known("inputs", width, evidence.length("query.weight", 1)),
        contexts=said("contexts")
        or known("contexts", contexts, *(evidence.length(f"{name}.weight", 1) for name in ("key", "value"))),
        outputs=(
            said("outputs") or known("outputs", width, evidence.length("output.weight", 0))
            if output
            else _outputs(evidence, joined, "the values of the heads, as there is no output.weight")
        ),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        query_bias="query.bias" in evidence.names,
        key_bias="key.bias" in evidence.names,
        value_bias="value.bias" in evidence.names,
        output=output,
        output_bias=output and "output.bias" in evidence.names,
        causal=said(scope + "causal", False),
        window=tuple(said(scope + "window", (-1, -1))),
        scale=said(scope + "scale"),
        softcap=float(said(scope + "softcap", 0.0)),
        alibi=() if scope else _alibi(said("alibi", ()), heads),
        rotary=None if scope or not said("rotary") else _rotary(evidence, head_dim),
    )


def _outputs(evidence: Evidence, length: int, what: str) -> int:
    """The width of the outputs where it follows from others. Raises UndeterminedError if another is declared."""
    if (declared := evidence.get("outputs", length)) != length:
        raise UndeterminedError("outputs", f"{length}, {what}", declared)
    return length


def _alibi(declared: str | list[float], heads: int) -> tuple[float, ...]:
    """The slopes: as declared, or `geometric`, 2^(-8i/H) for the heads i = 1 to H (Press et al. 2022)."""
    if declared == "geometric":
        if heads & (heads - 1):
            # For other head counts published models differ from the formula, and from each other.
            raise UndeterminedError("alibi", f"slopes for {heads} heads (geometric is for a power of two)", "geometric")
        return tuple(2.0 ** (-8 * index / heads) for index in range(1, heads + 1))
    if declared and len(declared) != heads:
        raise UndeterminedError("alibi", f"{heads} slopes, one a head", len(declared))
    return tuple(map(float, declared))


def _rotary(evidence: Evidence, head_dim: int) -> Rotary:
    width = evidence.get("rotary.width", head_dim * evidence.get("rotary.fraction", 1))
    if width != int(width) or width % 2 or not 0 < width <= head_dim:
        raise UndeterminedError("rotary", f"an even number of a head's {head_dim} dimensions", width)
    return Rotary(
        width=int(width),
        base=float(evidence.required("rotary.base", "the base of the angles, such as 10000.0")),
        interleaved=evidence.get("rotary.interleaved", False),
        offset=evidence.get("rotary.offset", 0),
    )


def learned_score(kind: Literal["additive", "general"], evidence: Evidence) -> LearnedScore:
    """Attention of one head by a learned score."""
    said, length, names = evidence.get, evidence.length, evidence.names
    query, key = ("query.weight", "key.weight") if kind == "additive" else ("score.weight", "score.weight")
    contexts = said("contexts") or known("contexts", length(key, 1), length("value.weight", 1))
    value = "value.weight" in names
    return LearnedScore(
        score=kind,
        inputs=said("inputs") or known("inputs", length(query, 1 if kind == "additive" else 0)),
        contexts=contexts,
        outputs=(
            said("outputs") or known("outputs", length("value.weight", 0))
            if value
            else _outputs(evidence, contexts, "the width of the context, as there is no value.weight")
        ),
        units=0 if kind == "general" else said("units") or known("units", length(query, 0), length(key, 0)),
        bias="bias" in names,
        score_weight=kind == "general" or "score.weight" in names,
        value=value,
        value_bias=value and "value.bias" in names,
        causal=said("causal", False),
        window=tuple(said("window", (-1, -1))),
        scale=said("scale"),
    )


def transformer(evidence: Evidence) -> Transformer:
    """A stack of blocks. Where blocks differ, the majority counts; the others are misshapen."""
    said = evidence.get
    block = _typical_block(evidence)
    width = known(
        "width",
        said("width"),
        block.elements("self.norm.weight"),
        block.length("self.query.weight", 1),
        block.length("feed_forward.up.weight", 1),
        evidence.length("embedding.token.weight", 1),
    )
    norm = _norm(evidence, block, "self.norm.", width)
    cross = None
    if any(name.startswith("cross.") for name in block.names):
        contexts = said("contexts") or block.length("cross.key.weight", 1)
        # `contexts` concerns the cross-attention alone: the self-attention's context is its input.
        cross = attention(block.below("cross."), width, contexts, scope="cross.")
    options = {key: value for key, value in evidence.options.items() if key != "contexts"}
    inner = block.below("self.")
    self_attention = attention(Evidence(options, inner.names, inner.shapes), width, width)
    hidden = said("hidden") or known(
        "hidden", block.length("feed_forward.up.weight", 0), block.length("feed_forward.down.weight", 1)
    )
    feed_forward = FeedForward(
        width=width,
        hidden=hidden,
        activation=evidence.required("activation", "an activation"),
        gated="feed_forward.gate.weight" in block.names,
        up_bias="feed_forward.up.bias" in block.names,
        down_bias="feed_forward.down.bias" in block.names,
    )
    numbers = [int(name.split(".")[1]) for name in evidence.names if re.match(r"blocks\.\d+\.", name)]
    return Transformer(
        blocks=known("blocks", said("blocks"), max(numbers, default=-1) + 1),
        block=Block(
            self_attention=self_attention,
            cross_attention=cross,
            feed_forward=feed_forward,
            norm=norm,
            pre_norm=evidence.required("pre_norm", "true (x + f(norm(x))) or false (norm(x + f(x)))"),
        ),
        embedding=_embedding(evidence, width),
        final_norm=_norm(evidence, evidence, "norm.", width) if "norm.weight" in evidence.names else None,
    )


def _typical_block(evidence: Evidence) -> Evidence:
    """One block for all: the names that any block has, each with the shape that most of them have."""
    shapes: dict[str, Counter[Shape]] = {}
    names = {name.split(".", 2)[2] for name in evidence.names if name.startswith("blocks.")}
    for name, shape in evidence.shapes.items():
        if name.startswith("blocks."):
            shapes.setdefault(name.split(".", 2)[2], Counter())[shape] += 1
    return Evidence(evidence.options, names, {name: counts.most_common(1)[0][0] for name, counts in shapes.items()})


def _norm(evidence: Evidence, there: Evidence, prefix: str, width: int) -> Norm:
    return Norm(
        kind=evidence.required("norm.kind", "layer or rms"),
        width=width,
        epsilon=float(evidence.required("norm.epsilon", "a small number, such as 1e-5")),
        weight=prefix + "weight" in there.names,
        bias=prefix + "bias" in there.names,
        unit_offset=evidence.get("norm.unit_offset", False),
    )


def _embedding(evidence: Evidence, width: int) -> Embedding | None:
    def rows(table: str) -> int:
        name = f"embedding.{table}.weight"
        return known(name, evidence.length(name, 0)) if name in evidence.names else 0

    sinusoidal = evidence.get("embedding.sinusoidal", False)
    if not sinusoidal and not any(name.startswith("embedding.") for name in evidence.names):
        return None
    norm = "embedding.norm.weight" in evidence.names
    positions, offset = rows("position"), evidence.get("embedding.position_offset", 0)
    if positions and offset >= positions:
        expected = f"less than the {positions} positions that there are"
        raise UndeterminedError("embedding.position_offset", expected, offset)
    return Embedding(
        width=width,
        vocabulary=rows("token"),
        scale=float(evidence.get("embedding.scale", 1.0)),
        positions=positions,
        position_offset=offset,
        sinusoidal=sinusoidal,
        segments=rows("segment"),
        norm=_norm(evidence, evidence, "embedding.norm.", width) if norm else None,
    )
