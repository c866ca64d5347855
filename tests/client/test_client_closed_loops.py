"""An asyncio client whose event loop is closed before it: it can still be closed, in another loop.

In a process of its own: gRPC keeps some of a loop that was closed before its calls ended, and reports that later.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest
from askers import Transport, array, transport
from calls import PATIENCE_S
from peers import good_unary, peer, replies

from attnserve.v1 import attention_pb2 as pb

__all__ = ["transport"]

PROGRAM = """
import asyncio, sys, threading
import numpy as np
import uvloop
from attnserve import AsyncClient

loops, address, transport, state, patience = sys.argv[1:]
new_loop = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[loops]
looking_up = threading.Event()

def array(number):
    return np.full((2, 3), number, np.float32)

def look_up():
    looking_up.set()
    threading.Event().wait()

async def use():
    global client, futures
    client = AsyncClient(look_up if state == "looking up" else address, transport=transport, timeout=None)
    if state != "looking up":
        assert (await client.attend(array(1), array(1), array(1))).output[0, 0] == 1
    futures = []
    if state != "idle":
        futures = [client.submit(array(2), array(2), array(2)), client.submit(array(2), array(2), array(2))]
        futures.append(asyncio.ensure_future(futures[0]))
        if state == "looking up":
            await asyncio.sleep(0)
            assert looking_up.wait(float(patience))
        else:
            await client.attend(array(1), array(1), array(1))
    if state == "closing":
        asyncio.ensure_future(client.close())
        await asyncio.sleep(0)

async def close():
    for _ in range(2):
        await asyncio.wait_for(client.close(), float(patience))
    print(client)

async def use_another():
    async with AsyncClient(address, transport=transport, timeout=None) as client:
        print((await client.attend(array(3), array(3), array(3))).output[0, 0])

loop = new_loop()
loop.run_until_complete(use())
loop.close()
asyncio.run(close())
asyncio.run(use_another())
"""

HELD = array(2).tobytes()
"""The query of a call that is not answered before the end of a test."""


@pytest.fixture
def address() -> Iterator[str]:
    """A peer that answers all calls but those."""
    ends = threading.Event()

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            calls = [
                each for each in pb.AttendStreamRequest.FromString(message).calls if each.attend.query.data != HELD
            ]
            yield from replies(pb.AttendStreamRequest(calls=calls).SerializeToString())

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        if pb.AttendRequest.FromString(message).query.data == HELD:
            ends.wait(PATIENCE_S)
        return good_unary(message, context)

    with peer(stream, unary) as address:
        yield address
        ends.set()


@pytest.mark.parametrize("state", ["idle", "in flight", "looking up", "closing"])
@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_it_can_be_closed(address: str, transport: Transport, loops: str, state: str) -> None:
    command = [sys.executable, "-c", PROGRAM, loops, address, transport, state, str(PATIENCE_S / 2)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"AsyncClient\(.*, closed\)\n3\.0\n", run.stdout)
