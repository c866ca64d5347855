"""Many requests that each take the event loop long, though they compute nothing: others are answered in between."""

from __future__ import annotations

from typing import Any

import calls
import grpc
import messages
from conftest import Server

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import caches_pb2, tensor_pb2

CACHES, LAYERS, FORKS = 32, 256, 60
"""Each of these forks takes some 20 ms or more, as one step."""
SERVICE = "/attnserve.v1.CacheService/"


def ask(channel: grpc.Channel, method: str, request: Any) -> Any:
    """The future of a call of CacheService."""
    response = getattr(caches_pb2, f"CacheService{method}Response")
    callable_: Any = channel.unary_unary(SERVICE + method, type(request).SerializeToString, response.FromString)
    return callable_.future(request, timeout=calls.PATIENCE_S)


def test_others_are_answered_between_forks(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        shape = caches_pb2.CacheServiceCreateRequest(
            num_kv_heads=1, head_dim=4, layers=LAYERS, dtype=tensor_pb2.DATA_TYPE_FLOAT32
        )
        names = [each.result().cache.name for each in [ask(channel, "Create", shape) for _ in range(CACHES)]]
        forks = [ask(channel, "Fork", caches_pb2.CacheServiceForkRequest(names=names)) for _ in range(FORKS)]
        calls.until(lambda: any(fork.done() for fork in forks), "one has been made")
        request = messages.random_attend(1)
        for _ in range(3):
            with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)) as other:
                reply = calls.unary(other, "Attend", request.SerializeToString())
                calls.assert_answers(pb.AttendResponse.FromString(reply), request)
        assert not all(fork.done() for fork in forks)
        names += [cache.name for fork in forks for cache in fork.result().caches]
        assert len(names) == (FORKS + 1) * CACHES
        ask(channel, "Delete", caches_pb2.CacheServiceDeleteRequest(names=names)).result()
    calls.until_nothing_is_in_flight(server.http_address)
