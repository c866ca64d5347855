"""RPCs of which a caller has one at a time: the next begins when the reply to the one before has been sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from calls import ANY_LENGTH, PATIENCE_S
from dam import Dam
from grpc import aio, method_handlers_generic_handler
from rpcs import new_metrics, rpcs_of

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller
from attnserve_server.errors import Overloaded
from attnserve_server.rpc.caller_turns import MOST_WAITING, CallerTurns


async def test_turns_come_in_order_and_one_caller_does_not_wait_for_another() -> None:
    turns, had = CallerTurns(), []

    async def take(caller: str, number: int) -> Any:
        end = await turns.take(caller)
        had.append((caller, number))
        return end

    first, other = await take("a", 0), await take("b", 0)
    waiting = [asyncio.create_task(take("a", number)) for number in range(1, 4)]
    await asyncio.sleep(0)
    assert had == [("a", 0), ("b", 0)]
    first()
    second = await waiting[0]
    second()
    waiting[1].cancel()  # its turn has come, and it does not know
    waiting[2].add_done_callback(lambda task: task.result()())
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    await waiting[2]
    assert had == [("a", 0), ("b", 0), ("a", 1), ("a", 3)]
    gone = asyncio.create_task(take("b", 1))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    other()
    (await take("b", 2))()
    await asyncio.sleep(0)
    assert not turns._waiting, "nothing is kept of those who wait for nothing"


async def test_one_that_leaves_as_the_turn_before_ends() -> None:
    turns = CallerTurns()
    end = await turns.take("a")
    waiting = [asyncio.create_task(turns.take("a")) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    end()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    (await waiting[1])()
    assert not turns._waiting


async def test_few_wait_and_those_who_leave_make_room() -> None:
    turns = CallerTurns()
    end = await turns.take("a")
    waiting = [asyncio.create_task(turns.take("a")) for _ in range(MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="its share"):
        await turns.take("a")
    (await turns.take("b"))()
    for task in waiting[:10]:
        task.cancel()
    await asyncio.wait(waiting[:10])
    waiting += [asyncio.create_task(turns.take("a")) for _ in range(10)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="its share"):
        await turns.take("a")
    end()
    for task in waiting[10:]:
        (await task)()
    assert not turns._waiting


async def test_a_caller_who_does_not_read_a_reply_waits_for_the_next() -> None:
    begun: list[str] = []
    first = asyncio.Event()

    def answer(caller: Caller, request: pb.ServerInfoRequest) -> bytes:
        begun.append(str(caller.share))
        first.set()
        return bytes(8 << 20)

    rpcs = rpcs_of(new_metrics())
    handler = rpcs.answering("list", pb.ServerInfoRequest, answer, "use", one_at_a_time=True)
    server = aio.server()
    server.add_generic_rpc_handlers((method_handlers_generic_handler("test.Test", {"List": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = (*ANY_LENGTH, ("grpc.use_local_subchannel_pool", 1))
    address = f"127.0.0.1:{port}"
    with Dam(address) as dam:
        async with aio.insecure_channel(dam.address, options) as slow, aio.insecure_channel(address, options) as other:
            await asyncio.wait_for(slow.channel_ready(), PATIENCE_S)
            dam.shut()
            unread = [slow.unary_unary("/test.Test/List")(b"", timeout=PATIENCE_S) for _ in range(3)]
            await asyncio.wait_for(first.wait(), PATIENCE_S)
            for _ in range(3):
                assert len(await other.unary_unary("/test.Test/List")(b"", timeout=PATIENCE_S)) == 8 << 20
            assert len(begun) == 1 + 3, "of the three unread ones, one has begun"
            assert len(set(begun)) == 2
            dam.open()
            assert [len(reply) for reply in await asyncio.gather(*unread)] == [8 << 20] * 3
    await server.stop(None)
