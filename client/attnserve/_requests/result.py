"""The results of calls, as the caller gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from attnserve._requests.arguments import ArrayT


@dataclass(frozen=True, slots=True)
class Timings:
    """How long each phase of a call took, in seconds: phases as measured by the server, the total by the SDK.

    - `decode`: decoding and checking the request.
    - `queue`: waiting to be run.
    - `staging`: moving the batch to the device.
    - `compute`: computing the batch.
    - `encode`: moving the results back; encoding them, which ends after this was written, is only in the server's
      metrics.
    - `total`: from the call of the client's method to the result, including the network.
    """

    decode: float
    queue: float
    staging: float
    compute: float
    encode: float
    total: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult(Generic[ArrayT]):
    """The result of an attention. Arrays are of the query's kind, NumPy or torch, and on the query's device.

    - `output`: ``[B, Hq, Lq, Dv]`` in the layout, rank and dtype of the query.
    - `lse`: log-sum-exp of each row: ``[B, Hq, Lq]`` whatever the layout (``[Hq, total]`` if packed), without the axes
      that the query's rank lacks; float32, or float64 for float64 queries. None unless asked for.
    - `scores`: the scores asked for: ``[B, Hq, Lq, S]`` whatever the layout (``[Hq, total, longest S]`` if packed, with
      -inf, or 0 for weights, beyond a sequence's own keys), without the axes that the query's rank lacks, in the dtype
      of the query. None unless asked for.
    - `timings`: how long each phase took.
    - `batch_size`: how many requests were in its batch, itself included.
    - `cache_lengths`: how many tokens the layer now has in each of the resident caches; empty without caches.
    """

    output: ArrayT
    lse: ArrayT | None
    scores: ArrayT | None
    timings: Timings
    batch_size: int
    cache_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LayerResult(Generic[ArrayT]):
    """The result of a layer. Arrays are of the input's kind, NumPy or torch, and on the input's device.

    - `output`: ``[B, L, d_out]``, ``[L, d_out]`` for one sequence, or packed ``[total, d_out]``, like the input; of the
      input's dtype, or of the layer's if the input is token ids. Padding is 0.
    - `lse`: log-sum-exp of each row and head: ``[B, Hq, L]``, ``[Hq, L]`` for one sequence, or ``[Hq, total]`` if
      packed; -inf in padding; float32, or float64 for float64 layers. None unless asked for.
    - `scores`: the scores asked for, in the output's dtype: ``[B, Hq, L, S]``, ``[Hq, L, S]`` for one sequence, or
      ``[Hq, total, longest S]`` if packed; in padding and beyond a sequence's own keys -inf, or 0 for weights. Without
      the axis Hq if averaged. None unless asked for.
    - `timings`: how long each phase took.
    - `batch_size`: how many requests were in its batch, itself included.
    - `layer_version`: the version of the layer that computed it, as in `Layer.version`. If it changes between two calls
      with one cache, the cache has keys and values of both.
    - `cache_lengths`: how many tokens each of the resident caches now has; empty without caches.
    """

    output: ArrayT
    lse: ArrayT | None
    scores: ArrayT | None
    timings: Timings
    batch_size: int
    layer_version: int
    cache_lengths: tuple[int, ...] = ()
