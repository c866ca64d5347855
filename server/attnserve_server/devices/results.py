"""From what kernels computed to what replies carry: on the host, packed, in the layouts of the requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from attnserve_server.devices.staging import TORCH, StagedCall
from attnserve_server.kernels import AttentionResult, accumulation_dtype, excluded_score, widened
from attnserve_server.requests.extent import Span
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import RequestResult

if TYPE_CHECKING:
    from attnserve_server.devices.device import Device

ReplyTensors: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The output, lse and scores of a reply, where they were computed."""

Rows: TypeAlias = tuple[slice, slice, slice]
"""Some of the rows of an output [N, H, L, Dv]."""


def collect(
    requests: Sequence[Request], staged: Sequence[StagedCall], results: Sequence[AttentionResult]
) -> list[RequestResult]:
    """The results of a batch, on the host and in the layouts of their requests."""
    gathered: list[RequestResult | None] = [None] * len(requests)
    pieces: dict[int, list[tuple[Span, AttentionResult]]] = {}
    for staged_call, result in zip(staged, results, strict=True):
        index, span = staged_call.parts[0]
        if len(requests[index].spans) > 1 or requests[index].problem.packed:
            pieces.setdefault(index, []).append((span, result))
            continue
        problem = requests[index].problem
        output = result.output.transpose(1, 2) if problem.tokens_first else result.output
        count = len(staged_call.parts)
        outputs = rows_of_bytes(output, count)
        lses = None if result.lse is None else rows_of_bytes(result.lse, count)
        scores = None
        if result.scores is not None:  # they lack the keys that `kv_lengths` cut off
            scores = rows_of_bytes(widened(result.scores, problem.kv_length, problem.return_scores), count)
        for place, (index, _) in enumerate(staged_call.parts):
            gathered[index] = RequestResult(
                outputs[place],
                None if lses is None else lses[place],
                None if scores is None else scores[place],
            )
    for index, parts in pieces.items():
        gathered[index] = _assemble(requests[index], parts)
    for index, request in enumerate(requests):
        if gathered[index] is None:
            gathered[index] = _of_no_queries(request.problem)
    return gathered  # type: ignore[return-value]  # every place has been filled


def fetched(device: Device, arranged: Sequence[ReplyTensors]) -> list[RequestResult]:
    """The results that replies carry, from tensors in the layouts of replies; all are fetched to the host together."""
    return results_of(arranged, iter(device.fetch(tensors_of(arranged))))


def tensors_of(arranged: Sequence[ReplyTensors]) -> list[torch.Tensor]:
    """The tensors in the layouts of replies that are to be fetched, packed."""
    return [part.contiguous() for parts in arranged for part in parts if part is not None]


def results_of(arranged: Sequence[ReplyTensors], here: Iterator[torch.Tensor]) -> list[RequestResult]:
    """The results that replies carry, from these tensors on the host."""
    apart = map(_apart, here)
    found = ([None if part is None else rows_of_bytes(next(apart), 1)[0] for part in parts] for parts in arranged)
    return [RequestResult(output, lse, scores) for output, lse, scores in found]  # type: ignore[arg-type]


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it is less than half of what shares its memory, such as the results of a whole batch: a
    caller slow to receive a reply must not hold those of others.
    """
    return tensor.clone() if 2 * tensor.nbytes < tensor.untyped_storage().nbytes() else tensor


def _of_no_queries(problem: Problem) -> RequestResult:
    """An empty result, made without any tensor: lengths other than that of the queries may exceed all bounds."""
    nothing = memoryview(b"")
    lse, scores = (nothing if asked else None for asked in (problem.return_lse, problem.return_scores))
    return RequestResult(nothing, lse, scores)


def _assemble(request: Request, parts: list[tuple[Span, AttentionResult]]) -> RequestResult:
    """The result of a request whose spans were computed separately."""
    problem = request.problem
    dtype = TORCH[problem.dtype]
    rows, width, heads = problem.query_length, problem.value_dim, problem.query_heads
    batch = 1 if problem.packed else problem.batch
    output = torch.empty(batch, heads, rows, width, dtype=dtype)
    lse = torch.empty(batch, heads, rows, dtype=accumulation_dtype(dtype)) if problem.return_lse else None
    scores = None
    if problem.return_scores is not None:
        excluded = excluded_score(problem.return_scores)
        scores = torch.full((batch, heads, rows, request.longest[1]), excluded, dtype=dtype)
    for span, result in parts:
        where = rows_of(problem, span)
        output[where] = result.output
        if lse is not None and result.lse is not None:
            lse[where] = result.lse
        if scores is not None and result.scores is not None:
            scores[where][..., : result.scores.shape[-1]] = result.scores
    if problem.tokens_first:
        output = output.transpose(1, 2)
    (output_bytes,) = rows_of_bytes(output, 1)
    return RequestResult(
        output_bytes,
        None if lse is None else rows_of_bytes(lse, 1)[0],
        None if scores is None else rows_of_bytes(scores, 1)[0],
    )


def put(into: RequestResult, problem: Problem, where: Rows, result: AttentionResult) -> None:
    """Overwrites output and lse in some rows of a result that is on the host."""
    batch = 1 if problem.packed else problem.batch
    heads, rows = problem.query_heads, problem.query_length
    output = torch.frombuffer(into.output, dtype=TORCH[problem.dtype])
    if problem.tokens_first:
        whole = output.view(batch, rows, heads, problem.value_dim).transpose(1, 2)
    else:
        whole = output.view(batch, heads, rows, problem.value_dim)
    whole[where] = result.output
    if into.lse is not None and result.lse is not None:
        torch.frombuffer(into.lse, dtype=result.lse.dtype).view(batch, heads, rows)[where] = result.lse


def rows_of(problem: Problem, span: Span) -> Rows:
    """Where the rows of a span are in an output."""
    if problem.packed:
        return slice(0, 1), slice(None), slice(span.query_start, span.query_start + span.query_length)
    return slice(span.first, span.first + span.sequences), slice(None), slice(None)


def rows_of_bytes(tensor: torch.Tensor, count: int) -> list[memoryview]:
    """The bytes of a host tensor, packed, in `count` equal parts along its first axis. Of more than two, each has
    memory of its own, as in `_apart`.
    """
    flat = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    size = len(flat) // count
    parts = [flat[place * size : (place + 1) * size] for place in range(count)]
    return parts if count < 3 else [memoryview(np.array(part)) for part in parts]  # type: ignore[arg-type]
