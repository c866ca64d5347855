"""Cases as kernels take them, without a service around them, and what kernels return, as arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import torch
from cases import Case

from attnserve_server.kernels import AdditiveScore, AttentionCall, AttentionResult, GeneralScore, attend


def tensor(array: Any) -> torch.Tensor:
    """The array as a tensor with memory of its own; also bfloat16, which torch's NumPy bridge does not support."""
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor: torch.Tensor) -> oracle.Array:
    """The tensor as an array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def window_of(case: Case) -> tuple[int, int]:
    """The window and the causal mask of a case, as kernels take them."""
    left, right = case.options.get("window", (-1, -1))
    return left, 0 if case.options.get("causal") else right


def call_of(case: Case, **returned: Any) -> AttentionCall:
    """A case of rank 4, heads first, without lengths, as the kernels take it."""
    options, score = case.options, case.options.get("score")
    wide = torch.float64 if case.query.dtype == np.float64 else torch.float32

    def parameter(name: str) -> torch.Tensor | None:
        return tensor(options[name]).to(wide) if name in options else None

    def of_rank_4(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter[(None,) * (4 - parameter.dim())]

    offset = options.get("query_offset")
    if offset is None:
        offset = case.key.shape[2] - case.query.shape[2] if options.get("causal") == "bottom_right" else 0
    kernel_score: GeneralScore | AdditiveScore | None = None
    if isinstance(score, oracle.General):
        kernel_score = GeneralScore(tensor(score.weight))
    elif isinstance(score, oracle.Additive):
        optional = [None if p is None else tensor(p) for p in (score.bias, score.output_weight)]
        kernel_score = AdditiveScore(tensor(score.query_weight), tensor(score.key_weight), *optional)
    return AttentionCall(
        query=tensor(case.query),
        key=tensor(case.key),
        value=tensor(case.value),
        scale=options.get("scale", 1.0 if score is not None else case.query.shape[3] ** -0.5),
        score=kernel_score,
        softcap=options.get("softcap", 0.0),
        offset=offset,
        window=window_of(case),
        mask=of_rank_4(tensor(options["mask"]) if "mask" in options else None),
        bias=of_rank_4(parameter("bias")),
        alibi_slopes=parameter("alibi_slopes"),
        sinks=parameter("sinks"),
        **returned,
    )


def run(call: AttentionCall) -> Any:
    """The result of a call, as arrays."""
    return arrays_of(attend(call))


def arrays_of(result: AttentionResult) -> Any:
    """A result in arrays."""
    lse, scores = (None if part is None else array(part) for part in (result.lse, result.scores))
    return SimpleNamespace(output=array(result.output), lse=lse, scores=scores, kernel=result.kernel)
