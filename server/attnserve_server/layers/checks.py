"""Whether a request fits a layer: shapes, token ids, positions, options. Error messages name the request's fields."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from attnserve_server.errors import InvalidRequest
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.specification import Architecture, Attention, Embedding, LearnedScore, Transformer
from attnserve_server.requests.options import check_offset


def check_asked(architecture: Architecture, options: LayerOptions, given: Collection[str]) -> None:
    """Raises InvalidRequest if a layer does not support what is asked, whatever the contents of the given tensors."""
    if isinstance(architecture, Transformer):
        _check_asked_of_transformer(architecture, options, given)
        return
    if "context" not in given and architecture.inputs != architecture.contexts:
        raise InvalidRequest("context", f"a context of width {architecture.contexts}", "none")
    if "segments" in given:
        raise InvalidRequest("segments", "none, for this layer has no segments", "some")
    if options.average_scores and options.return_scores is None:
        raise InvalidRequest("average_scores", "return_scores to average", "none")


def _check_asked_of_transformer(transformer: Transformer, options: LayerOptions, given: Collection[str]) -> None:
    cross_attention, embedding = transformer.block.cross_attention, transformer.embedding
    if cross_attention is None and "context" in given:
        raise InvalidRequest("context", "none, for this layer has no cross-attention", "one")
    if cross_attention is not None and "context" not in given:
        raise InvalidRequest("context", f"a context of width {cross_attention.contexts}", "none")
    defined, returned = "a transformer's blocks define it", "a transformer returns its output alone"
    for name, asked, why in (
        ("causal", options.causal is not None, defined),
        ("window", options.window is not None, defined),
        ("return_lse", options.return_lse, returned),
        ("return_scores", options.return_scores is not None, returned),
        ("average_scores", options.average_scores, returned),
        ("bias", "bias" in given, defined),
    ):
        if asked:
            raise InvalidRequest(name, f"none, for {why}", "one")
    if "segments" in given and (embedding is None or not embedding.segments):
        raise InvalidRequest("segments", "none, for this layer has no segments", "some")


def _given(request: LayerInput) -> list[str]:
    """The optional tensors that a request has."""
    return [name for name in ("context", "mask", "bias", "segments") if getattr(request, name) is not None]


def check_attention(attention: Attention | LearnedScore, dtype: torch.dtype, request: LayerInput) -> None:
    """Raises InvalidRequest unless a layer with a single attention can compute a request."""
    check_asked(attention, request.options, _given(request))
    heads = attention.heads if isinstance(attention, Attention) else 1
    _check_activations("input", request.input, attention.inputs, dtype)
    _check_sequences(request, heads)
    if request.context is not None:
        _check_activations("context", request.context, attention.contexts, dtype)


def check_transformer(transformer: Transformer, dtype: torch.dtype, request: LayerInput) -> None:
    """Raises InvalidRequest unless a transformer can compute a request."""
    check_asked(transformer, request.options, _given(request))
    block, embedding = transformer.block, transformer.embedding
    if embedding is not None and embedding.vocabulary:
        _check_ids("input", request.input, embedding.vocabulary)
    else:
        _check_activations("input", request.input, block.self_attention.inputs, dtype)
    _check_sequences(request, block.self_attention.heads, own_keys=True)
    if block.cross_attention is not None and request.context is not None:
        _check_activations("context", request.context, block.cross_attention.contexts, dtype)
    _check_positions(embedding, request)
    if request.segments is not None and embedding is not None:
        if request.segments.shape != request.input.shape[:1]:
            raise InvalidRequest("segments", f"{len(request.input)} segments", f"{len(request.segments)}")
        _check_ids("segments", request.segments, embedding.segments)


def _check_activations(field: str, rows: torch.Tensor, width: int, dtype: torch.dtype) -> None:
    if rows.dim() != 2 or rows.shape[1] != width:
        raise InvalidRequest(f"{field}.shape", f"rows of width {width}", list(rows.shape))
    if rows.dtype != dtype:
        raise InvalidRequest(f"{field}.dtype", _name(dtype), _name(rows.dtype))


def _check_ids(field: str, ids: torch.Tensor, count: int) -> None:
    if ids.dtype != torch.int64:
        raise InvalidRequest(f"{field}.dtype", "int64", _name(ids.dtype))
    if ids.dim() != 1:
        raise InvalidRequest(f"{field}.shape", "one id a token", list(ids.shape))
    if not len(ids):
        return
    least, most = (int(extreme) for extreme in torch.aminmax(ids))
    if least < 0 or most >= count:
        raise InvalidRequest(field, f"ids from 0 to {count - 1}", least if least < 0 else most)


def _check_sequences(request: LayerInput, heads: int, *, own_keys: bool = False) -> None:
    """Lengths, offsets, mask and bias."""
    lengths, kv_lengths = request.lengths, request.lengths
    _check_lengths("lengths", lengths, len(request.input))
    if (request.context is None) != (request.context_lengths is None):
        raise InvalidRequest("context_lengths", "a context and its lengths, or neither", "one of them")
    if request.context is not None and request.context_lengths is not None:
        _check_lengths("context_lengths", request.context_lengths, len(request.context))
        if len(request.context_lengths) != len(lengths):
            raise InvalidRequest("context_lengths", f"{len(lengths)} sequences", len(request.context_lengths))
        kv_lengths = lengths if own_keys else request.context_lengths
    if request.offsets is not None:
        if len(request.offsets) != len(lengths):
            raise InvalidRequest("query_offset", f"{len(lengths)} offsets", len(request.offsets))
        for index, offset in enumerate(request.offsets):
            check_offset(index, offset)
    target = (len(lengths), heads, max(lengths, default=0), max(kv_lengths, default=0))
    for name, tensor in (("mask", request.mask), ("bias", request.bias)):
        if tensor is None:
            continue
        if tensor.dim() != 4 or any(
            length not in (1, wanted) for length, wanted in zip(tensor.shape, target, strict=True)
        ):
            raise InvalidRequest(f"{name}.shape", f"a shape that broadcasts to {list(target)}", list(tensor.shape))


def _check_lengths(field: str, lengths: Sequence[int], rows: int) -> None:
    if any(length < 0 for length in lengths):
        raise InvalidRequest(field, "no negative lengths", min(lengths))
    if sum(lengths) != rows:
        raise InvalidRequest(field, f"lengths that sum to {rows}", sum(lengths))


def _check_positions(embedding: Embedding | None, request: LayerInput) -> None:
    """Positions must be within the table if they are learned."""
    if embedding is None or (end := embedding.end_of_positions) is None:
        return
    field = "input" if request.offsets is None else "query_offset"
    begin = -embedding.position_offset
    offsets = [0] * len(request.lengths) if request.offsets is None else request.offsets
    for length, offset in zip(request.lengths, offsets, strict=True):
        if length and not (begin <= offset and offset + length <= end):
            raise InvalidRequest(field, f"positions from {begin} to {end - 1}", f"{offset} to {offset + length - 1}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
