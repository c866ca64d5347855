"""What is asked of a layer, as far as the layer decides it: options, and the contents of ids and positions. Shapes,
dtypes and lengths have been checked before (`application`, `extent`). Error messages name the request's fields.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from attnserve_server.errors import InvalidRequest
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.specification import Architecture, Embedding, Transformer


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


def check_contents(architecture: Architecture, request: LayerInput) -> None:
    """Raises InvalidRequest if token ids, segments or positions are not within the tables of a layer."""
    embedding = architecture.embedding if isinstance(architecture, Transformer) else None
    if embedding is None:
        return
    if embedding.vocabulary:
        _check_ids("input", request.input, embedding.vocabulary)
    if request.segments is not None:
        _check_ids("segments", request.segments, embedding.segments)
    _check_positions(embedding, request)


def _check_ids(field: str, ids: torch.Tensor, count: int) -> None:
    if not len(ids):
        return
    least, most = (int(extreme) for extreme in torch.aminmax(ids))
    if least < 0 or most >= count:
        raise InvalidRequest(field, f"ids from 0 to {count - 1}", least if least < 0 else most)


def _check_positions(embedding: Embedding, request: LayerInput) -> None:
    """Positions must be within the table if they are learned."""
    end = embedding.end_of_positions
    if end is None:
        return
    field = "input" if request.offsets is None else "query_offset"
    begin = -embedding.position_offset
    offsets = [0] * len(request.lengths) if request.offsets is None else request.offsets
    for length, offset in zip(request.lengths, offsets, strict=True):
        if length and not (begin <= offset and offset + length <= end):
            raise InvalidRequest(field, f"positions from {begin} to {end - 1}", f"{offset} to {offset + length - 1}")
