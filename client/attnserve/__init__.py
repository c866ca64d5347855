"""attnserve: attention as a network service. This is its SDK.

    from attnserve import Client

    with Client("127.0.0.1:8001") as client:
        result = client.attend(query, key, value, causal=True)     # NumPy in, NumPy out; torch in, torch out
        result.output, result.lse, result.scores, result.timings
        client.apply("minilm", token_ids, lengths=lengths)             # layers whose weights the server holds
        client.layers.list()
        with client.create_cache(num_kv_heads=8, head_dim=64) as cache:   # keys and values that stay on the server
            cache.attend(query, key, value, causal=True)

`AsyncClient` is the same for asyncio, `TLS` and `Token` are for servers with TLS or authentication, `merge_attention`
combines attentions over disjoint keys, and every error is an `AttnServeError`. `Address`, `AppendLayout`, `ArrayLike`,
`ArrayOf`, `Causal`, `Layout`, `Names`, `Pending`, `Scores`, `Timeout` and `Transport` are the types in signatures, for
whoever wraps them. Everything public is here, but for `attnserve.integrations.transformers`, and for `attnserve.v1`,
the code generated from the protos.
"""

from attnserve._async_client import AsyncClient
from attnserve._caching.caches import AsyncCache, AsyncCaches, Cache, Caches
from attnserve._caching.pending import Pending
from attnserve._client import Client
from attnserve._errors import (
    AttnServeError,
    ClientClosedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    ProtocolError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
)
from attnserve._info import Kernel, Limits, ServerInfo, Setting
from attnserve._layers import AsyncLayers, Layer, Layers
from attnserve._merge import MergedAttention, merge_attention
from attnserve._requests.apply import ApplyOptions
from attnserve._requests.arguments import ArrayLike, ArrayOf, Causal, Names, Scores
from attnserve._requests.attend import AdditiveScore, AttendOptions, GeneralScore, Layout
from attnserve._requests.cache_requests import AppendLayout, CacheInfo, CachePool
from attnserve._requests.result import AttentionResult, LayerResult, Timings
from attnserve._settings.config import Timeout, Transport
from attnserve._settings.credentials import TLS, Token
from attnserve._settings.targets import Address
from attnserve._version import __version__

__all__ = [
    "TLS",
    "AdditiveScore",
    "Address",
    "AppendLayout",
    "ApplyOptions",
    "ArrayLike",
    "ArrayOf",
    "AsyncCache",
    "AsyncCaches",
    "AsyncClient",
    "AsyncLayers",
    "AttendOptions",
    "AttentionResult",
    "AttnServeError",
    "Cache",
    "CacheInfo",
    "CachePool",
    "Caches",
    "Causal",
    "Client",
    "ClientClosedError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "GeneralScore",
    "InvalidRequestError",
    "Kernel",
    "Layer",
    "LayerResult",
    "Layers",
    "Layout",
    "Limits",
    "MergedAttention",
    "Names",
    "NotFoundError",
    "OverloadedError",
    "Pending",
    "PermissionDeniedError",
    "ProtocolError",
    "RequestCancelledError",
    "Scores",
    "ServerError",
    "ServerInfo",
    "Setting",
    "Timeout",
    "Timings",
    "Token",
    "Transport",
    "UnavailableError",
    "__version__",
    "merge_attention",
]
