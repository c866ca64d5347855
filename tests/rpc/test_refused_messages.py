"""What a server keeps of the messages that it refuses: nothing, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from calls import PATIENCE_S
from grpc import aio, method_handlers_generic_handler
from rpcs import new_metrics, rpcs_of

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller
from attnserve_server.errors import InvalidRequest, error_for_caller
from attnserve_server.rpc.rpcs import Received


class Part:
    """Something that is read from a message."""


def unreadable(message: bytes, seen: list[weakref.ref[Part]]) -> None:
    """Fails while it holds the message, and while another error is handled, as readers do."""
    part = Part()
    seen.append(weakref.ref(part))
    try:
        raise ValueError(message, part)
    except ValueError:
        raise InvalidRequest("query", "something else", "this") from None


@pytest.mark.parametrize("plain", [False, True])
async def test_a_unary_call_that_is_refused(plain: bool) -> None:
    seen: list[weakref.ref[Part]] = []

    async def answer(received: Received) -> bytes:
        unreadable(received.message, seen)
        return b""

    def answer_plain(caller: Caller, request: pb.ServerInfoRequest) -> bytes:
        unreadable(b"", seen)
        return b""

    rpcs = rpcs_of(new_metrics())
    handler = (
        rpcs.answering("server_info", pb.ServerInfoRequest, answer_plain, "use")
        if plain
        else rpcs.unary("attend", lambda caller: None, answer)
    )
    server = aio.server()
    server.add_generic_rpc_handlers((method_handlers_generic_handler("test.Test", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.disable()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(3):
                with pytest.raises(aio.AioRpcError, match="something else"):
                    await channel.unary_unary("/test.Test/Call")(b"", timeout=PATIENCE_S)
        await server.stop(None)
        assert len(seen) == 3
        assert [part() for part in seen] == [None] * 3
    finally:
        gc.enable()


def test_an_error_that_is_kept_keeps_no_frames() -> None:
    """Errors of calls on a stream are kept by what they belong to."""
    seen: list[weakref.ref[Part]] = []
    kept: list[Any] = []
    gc.disable()
    try:
        try:
            unreadable(b"", seen)
        except InvalidRequest as error:
            kept.append(error_for_caller(error))
        assert seen[0]() is None
    finally:
        gc.enable()
