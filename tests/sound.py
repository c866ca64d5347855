"""One valid request of each kind, for every RPC: tests break them, and fuzzing starts from them.

In: the names of two caches of the server. Out: messages by RPC name and kind. They fit a server that has the layers of
`checkpoints`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import messages
import ml_dtypes
import numpy as np
from google.protobuf import message_factory
from google.protobuf.message import Message

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import caches_pb2, layers_pb2, tensor_pb2

B, HQ, HK, LQ, S, D, DK, DV, U = 2, 4, 2, 3, 5, 8, 7, 6, 9


class Method(NamedTuple):
    """An RPC."""

    path: str
    request: type[Message]
    response: type[Message]
    streaming: bool


def _methods() -> dict[str, Method]:
    found = {}
    for module in (pb, caches_pb2, layers_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                request, response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
                path = f"/{service.full_name}/{method.name}"
                found[f"{service.name}/{method.name}"] = Method(path, request, response, method.client_streaming)
    return found


METHODS: Final[dict[str, Method]] = _methods()
"""Every RPC in the protos."""


@dataclass(frozen=True)
class Caches:
    """Names of caches: one of HK heads of D in float32 with S tokens, and an empty one that fits the layer gpt2."""

    plain: str
    decoder: str


PLAIN_CACHE: Final = {"num_kv_heads": HK, "head_dim": D, "dtype": tensor_pb2.DATA_TYPE_FLOAT32}
DECODER_CACHE: Final = {**PLAIN_CACHE, "num_kv_heads": 4, "head_dim": 6, "layers": 2}


def array(*shape: int, dtype: Any = np.float32) -> messages.Array:
    """Zeros, so that mutations show."""
    return np.zeros(shape, dtype)


def tensor(*shape: int, dtype: Any = np.float32) -> tensor_pb2.Tensor:
    """Zeros as a tensor of the wire format."""
    return messages.tensor(array(*shape, dtype=dtype))


def ids(*values: int) -> tensor_pb2.Tensor:
    """Token ids, lengths or offsets."""
    return messages.tensor(np.array(values, np.int64))


def attend() -> dict[str, pb.AttendRequest]:
    """Attention with keys and values in the request."""
    learned = array(B, HQ, LQ, D), array(B, HK, S, DK), array(B, HK, S, DV)
    additive = {"query_weight": (U, D), "key_weight": (U, DK), "bias": (U,), "output_weight": (U,)}
    half = {"query": array(HQ, LQ, D), "key": array(HK, S, D), "value": array(HK, S, D)}
    return {
        "dot": messages.attend(
            array(B, HQ, LQ, D),
            array(B, HK, S, D),
            array(B, HK, S, DV),
            mask=array(B, 1, LQ, S, dtype=bool),
            bias=array(HQ, 1, S),
            alibi_slopes=array(HQ),
            sinks=array(HQ),
            kv_lengths=np.full(B, S),
            query_offset=array(B, dtype=np.int64),
            window=pb.Window(left=1, right=1),
            causal=True,
            scale=0.5,
            softcap=3.0,
            return_lse=True,
            return_scores=pb.SCORE_STAGE_WEIGHTS,
            alignment=pb.ALIGNMENT_BOTTOM_RIGHT,
            priority=1,
            layout=pb.LAYOUT_HEADS_FIRST,
        ),
        "general": messages.attend(*learned, general=pb.GeneralScore(weight=tensor(D, DK))),
        "additive": messages.attend(
            *learned, additive=pb.AdditiveScore(**{name: tensor(*shape) for name, shape in additive.items()})
        ),
        "packed": messages.attend(
            array(7, HQ, D),
            array(5, HK, D),
            array(5, HK, DV),
            layout=pb.LAYOUT_PACKED,
            query_lengths=np.array([3, 4]),
            kv_lengths=np.array([5, 0]),
            mask=array(4, 5, dtype=bool),
            bias=array(4, 5),
        ),
        "half": messages.attend(**{name: part.astype(ml_dtypes.bfloat16) for name, part in half.items()}),
        "flat": messages.attend(array(LQ, D), array(S, D), array(S, D), layout=pb.LAYOUT_LENGTH_FIRST),
    }


def attend_to_caches(caches: Caches) -> dict[str, pb.AttendRequest]:
    """Attention to a cache, with keys to append and without."""
    reference = pb.CacheReference(name=caches.plain, layer=0, expected_length=S)
    query, keys = tensor(1, HQ, LQ, D), tensor(1, HK, 0, D)
    return {
        "resident": pb.AttendRequest(query=query, caches=[reference], return_lse=True),
        "appending": pb.AttendRequest(query=query, key=keys, value=keys, caches=[reference]),
    }


def apply() -> dict[str, pb.ApplyRequest]:
    """Layers of all kinds."""
    self_attention = pb.ApplyRequest(
        layer="rotary",
        causal=True,
        alignment=pb.ALIGNMENT_TOP_LEFT,
        window=pb.Window(left=2, right=0),
        return_lse=True,
        return_scores=pb.SCORE_STAGE_MASKED,
        average_scores=True,
        priority=-1,
        input=tensor(B, LQ, 24),
        mask=tensor(B, 1, LQ, LQ, dtype=bool),
        bias=tensor(LQ, LQ),
        lengths=ids(LQ, 1),
        query_offset=ids(0, 1),
    )
    return {
        "self": self_attention,
        "packed": pb.ApplyRequest(layer="rotary", input=tensor(7, 24), lengths=ids(4, 3)),
        "cross": pb.ApplyRequest(
            layer="additive",
            input=tensor(B, LQ, 24),
            context=tensor(B, S, 10),
            lengths=ids(LQ, 0),
            context_lengths=ids(S, 1),
        ),
        "decoder": pb.ApplyRequest(layer="decoder/relu/post", input=tensor(LQ, 24), context=tensor(S, 24)),
        "bert": pb.ApplyRequest(layer="bert", input=tensor(B, LQ, dtype=np.int64), segments=ids_of(B, LQ)),
        "gpt2": pb.ApplyRequest(layer="gpt2", input=ids(1, 2, 3), query_offset=ids(2)),
    }


def apply_to_caches(caches: Caches) -> dict[str, pb.ApplyRequest]:
    """A decoder that continues from a cache; it appends nothing, so the request can be repeated."""
    reference = pb.CacheReference(name=caches.decoder, expected_length=0)
    return {
        "resident": pb.ApplyRequest(layer="gpt2", input=tensor(1, 0, dtype=np.int64), caches=[reference]),
    }


def ids_of(*shape: int) -> tensor_pb2.Tensor:
    """Zeros of int64."""
    return tensor(*shape, dtype=np.int64)


def requests(caches: Caches) -> dict[str, dict[str, Message]]:
    """Valid requests of every RPC. None of them changes a cache or a layer."""
    attends: dict[str, Message] = {**attend(), **attend_to_caches(caches)}
    applies: dict[str, Message] = {**apply(), **apply_to_caches(caches)}
    calls: dict[str, Message] = {
        "attend": pb.AttendStreamRequest(
            cancel=[7],
            calls=[pb.AttendStreamCall(id=n, timeout={"seconds": 60}, attend=attend()["dot"]) for n in (1, 2)],
        ),
        "apply": pb.AttendStreamRequest(calls=[pb.AttendStreamCall(id=3, apply=apply()["self"])]),
    }
    keys = tensor(HK, 0, D)
    return {
        "AttentionService/Attend": attends,
        "AttentionService/Apply": applies,
        "AttentionService/AttendStream": calls,
        "AttentionService/ServerInfo": {"": pb.ServerInfoRequest()},
        "CacheService/Create": {
            "": caches_pb2.CacheServiceCreateRequest(
                **PLAIN_CACHE, value_dim=D, layers=1, ttl={"nanos": 1}, request_id=b"1"
            ),
            "aliased": caches_pb2.CacheServiceCreateRequest(**PLAIN_CACHE, ttl={"nanos": 1}, alias="it"),
        },
        "CacheService/Append": {
            "": caches_pb2.CacheServiceAppendRequest(
                name=caches.plain, layer=0, expected_length=S, key=keys, value=keys, length_first=False
            )
        },
        "CacheService/Fork": {
            "": caches_pb2.CacheServiceForkRequest(names=[caches.plain], ttl={"nanos": 1}, request_id=b"2")
        },
        "CacheService/Truncate": {
            "": caches_pb2.CacheServiceTruncateRequest(
                truncations=[{"name": caches.plain, "length": S, "expected_length": S}]
            )
        },
        "CacheService/Get": {"": caches_pb2.CacheServiceGetRequest(name=caches.plain)},
        "CacheService/List": {"": caches_pb2.CacheServiceListRequest()},
        "CacheService/Delete": {"": caches_pb2.CacheServiceDeleteRequest(names=["nothing"])},
        "LayerService/List": {"": layers_pb2.LayerServiceListRequest()},
        "LayerService/Get": {"": layers_pb2.LayerServiceGetRequest(name="rotary")},
        "LayerService/Load": {
            "": layers_pb2.LayerServiceLoadRequest(definitions="layers.toml", names=["rotary"]),
        },
        "LayerService/Unload": {"": layers_pb2.LayerServiceUnloadRequest(names=["nothing"])},
    }
