"""A caller of `CacheService` that tests control: plain messages, and cases as attention to caches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import grpc
import messages
import numpy as np
import oracle
from cases import Case
from oracle import Array

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import caches_pb2

PATIENCE_S: Final = 60.0

_STAGES: Final[dict[str, Any]] = {
    "raw": pb.SCORE_STAGE_RAW,
    "capped": pb.SCORE_STAGE_CAPPED,
    "masked": pb.SCORE_STAGE_MASKED,
    "weights": pb.SCORE_STAGE_WEIGHTS,
}


class Reference(NamedTuple):
    """A cache in a request, its expected length, and the id of the append."""

    name: str
    layer: int = 0
    expected_length: int | None = None
    append_id: int = 0


class Caller:
    """One channel to a server. Every method raises grpc.RpcError."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def _ask(self, service: str, method: str, request: Any, response_type: Any) -> Any:
        ask: Any = self.channel.unary_unary(
            f"/attnserve.v1.{service}/{method}", lambda message: message.SerializeToString(), response_type.FromString
        )
        return ask(request, timeout=PATIENCE_S)

    def _cache(self, method: str, **fields: Any) -> Any:
        request_type = getattr(caches_pb2, f"CacheService{method}Request")
        response_type = getattr(caches_pb2, f"CacheService{method}Response")
        return self._ask("CacheService", method, request_type(**fields), response_type)

    def create(self, heads: int = 2, width: int = 8, *, dtype: str = "float32", **fields: Any) -> str:
        """The name of a new cache. `ttl` is in seconds."""
        if (ttl := fields.pop("ttl", None)) is not None:
            seconds = int(ttl)
            fields["ttl"] = {"seconds": seconds, "nanos": round((ttl - seconds) * 1e9)}
        fields = {"num_kv_heads": heads, "head_dim": width, "dtype": f"DATA_TYPE_{dtype.upper()}", **fields}
        name: str = self._cache("Create", **fields).cache.name
        return name

    def append(self, name: str, key: Array, value: Array, **fields: Any) -> int:
        """The length of the layer after keys [Hk, T, D] and values [Hk, T, Dv]."""
        key, value = messages.tensor(key), messages.tensor(value)  # type: ignore[assignment]
        length: int = self._cache("Append", name=name, key=key, value=value, **fields).length
        return length

    def fork(self, name: str, **fields: Any) -> caches_pb2.Cache:
        """The fork."""
        return self.forks([name], **fields)[0]

    def forks(self, names: Sequence[str], **fields: Any) -> list[caches_pb2.Cache]:
        """The forks of several."""
        return [*self._cache("Fork", names=names, **fields).caches]

    def truncate(self, name: str, length: int | None, **fields: Any) -> caches_pb2.Cache:
        """The cache after its truncation."""
        return self.truncations({"name": name, "length": length, **fields})[0]

    def truncations(self, *truncations: dict[str, Any]) -> list[caches_pb2.Cache]:
        """The caches after their truncations."""
        messages = [caches_pb2.Truncation(**each) for each in truncations]
        return [*self._cache("Truncate", truncations=messages).caches]

    def get(self, name: str) -> caches_pb2.Cache:
        """What the server says of it."""
        cache: caches_pb2.Cache = self._cache("Get", name=name).cache
        return cache

    def list(self, **fields: Any) -> caches_pb2.CacheServiceListResponse:
        """The first caches, or those of a page, and how full the pool is."""
        listed: caches_pb2.CacheServiceListResponse = self._cache("List", **fields)
        return listed

    def delete(self, *names: str) -> None:
        """Deletes caches."""
        self._cache("Delete", names=names)

    def give_up(self, *request_ids: bytes) -> None:
        """Says that nobody waits for what these requests make."""
        self._cache("Delete", request_ids=request_ids)

    def attend(self, request: pb.AttendRequest) -> pb.AttendResponse:
        """By a unary call."""
        reply: pb.AttendResponse = self._ask("AttentionService", "Attend", request, pb.AttendResponse)
        return reply

    def exists(self, name: str) -> bool:
        """Whether the server knows it."""
        try:
            self.get(name)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:  # type: ignore[attr-defined]
                raise
            return False
        return True


def references(given: Sequence[str | Reference]) -> list[pb.CacheReference]:
    """Caches as a request names them."""
    each = (Reference(one) if isinstance(one, str) else one for one in given)
    return [pb.CacheReference(**one._asdict()) for one in each]


def attend_request(
    case: Case,
    caches: Sequence[str | Reference] = (),
    appended: tuple[Array, Array] | None = None,
    *,
    return_lse: bool = False,
    return_scores: str | None = None,
) -> pb.AttendRequest:
    """The request for a case: over caches, after appending the `appended` keys and values, or with its own."""
    options = dict(case.options)
    causal, layout, window = (options.pop(name, None) for name in ("causal", "layout", "window"))
    fields: dict[str, Any] = {
        "causal": bool(causal),
        "alignment": pb.ALIGNMENT_BOTTOM_RIGHT if causal == "bottom_right" else pb.ALIGNMENT_TOP_LEFT,
        "layout": pb.LAYOUT_LENGTH_FIRST if layout == "length_first" else pb.LAYOUT_HEADS_FIRST,
        "return_lse": return_lse,
        "return_scores": _STAGES.get(return_scores or ""),
    }
    if window is not None:
        fields["window"] = pb.Window(left=window[0], right=window[1])
    score = options.pop("score", None)
    if isinstance(score, oracle.General):
        fields["general"] = pb.GeneralScore(weight=messages.tensor(score.weight))
    elif isinstance(score, oracle.Additive):
        parameters = {name: array for name, array in vars(score).items() if array is not None}
        fields["additive"] = pb.AdditiveScore(**{name: messages.tensor(array) for name, array in parameters.items()})
    for name, option in options.items():
        if option is None:
            continue
        if name in ("kv_lengths", "query_offset"):
            option = np.asarray(option, np.int64)
        fields[name] = option if name in ("scale", "softcap") else messages.tensor(np.asarray(option))
    key, value = appended or ((case.key, case.value) if not caches else (None, None))
    if key is not None and value is not None:
        fields |= {"key": messages.tensor(key), "value": messages.tensor(value)}
    return pb.AttendRequest(query=messages.tensor(case.query), caches=references(caches), **fields)


def result(reply: pb.AttendResponse) -> Any:
    """A reply's arrays, as results have them."""
    return SimpleNamespace(
        output=messages.array(reply.output),
        lse=messages.array(reply.lse) if reply.HasField("lse") else None,
        scores=messages.array(reply.scores) if reply.HasField("scores") else None,
    )


def tokens(seed: int, count: int, heads: int = 2, width: int = 8, dtype: Any = np.float32) -> tuple[Array, Array]:
    """Unit-normal keys and values [Hk, T, D]."""
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((heads, count, width)).astype(dtype) for _ in range(2))
    return key, value
