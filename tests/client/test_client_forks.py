"""A process that forks: its child has none of the client's threads, and raises an error instead of hanging."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from calls import PATIENCE_S
from conftest import Server

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")

COMMON = """
import asyncio, gc, os, signal, sys, threading
from concurrent.futures import wait
import numpy as np
import attnserve
from attnserve import AsyncClient, Client, ClientClosedError

address, patience = sys.argv[1], int(sys.argv[2])
array = np.ones((1, 2, 3), np.float32)

def attended(client):
    return client.attend(array, array, array).output[0, 0, 0]

async def awaited(client):
    return (await client.attend(array, array, array)).output[0, 0, 0]

def refused(function):
    try:
        function()
    except ClientClosedError as error:
        return str(error)
    raise AssertionError(function)

def in_child(function):
    '''Runs it in a child, which must come to its end.'''
    child = os.fork()
    if not child:
        signal.alarm(patience)  # ends the child, whatever it waits for
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, os.waitstatus_to_exitcode(status)
"""

USED = """
used, unused = Client(address, timeout=None), Client(address, timeout=None)
assert attended(used) == 1

def child():
    print(refused(lambda: used.submit(array, array, array)), flush=True)
    used.close()
    with Client(address, timeout=None) as own:
        assert attended(own) == attended(unused) == 1

in_child(child)
assert attended(used) == 1
"""

LOCKED = """
several = [address, address.replace("127.0.0.1", "localhost")]
clients = [Client(address, timeout=None), Client(several, timeout=None), Client(address, transport="unary")]
caches = [client.create_cache(2, 3) for client in clients]
pools = [client.caches for client in clients]
locks = []
for client, cache in zip(clients, caches):
    assert attended(client) == 1
    assert cache.append(array[0, :, None], array[0, :, None]) == 1
    calls = client._calls
    streams = calls.servers.connection()._streams
    locks += [calls.turns._lock, calls._unary._lock, calls.servers._lock, calls.servers._replicas._lock]
    locks += [stream._lock for stream in streams]

taken, given_back = threading.Event(), threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    taken.set()
    assert given_back.wait(patience)
    for lock in locks:
        lock.release()

holder = threading.Thread(target=hold)
holder.start()
assert taken.wait(patience)

def child():
    for client, cache, pool in zip(clients, caches, pools):
        for use in (
            lambda: attended(client),
            lambda: client.submit(array, array, array),
            lambda: client.apply("a layer", array[0]),
            lambda: client.server_info(timeout=None),
            lambda: client.create_cache(1, 3, timeout=None),
            lambda: client.open_cache(cache.name, timeout=None),
            lambda: client.submit(array, caches=cache),
            lambda: cache.attend(array[0, :, None], timeout=None),
            lambda: cache.fork(timeout=None),
            lambda: cache.delete(timeout=None),
            lambda: client.caches.list(timeout=None),
            lambda: pool.list(timeout=None),
            client.layers.list,
        ):
            print(refused(use), flush=True)
        client.close()

in_child(child)
given_back.set()
holder.join()
for client, cache in zip(clients, caches):
    assert attended(client) == 1
    assert cache.append(array[0, :, None], array[0, :, None]) == 2
    cache.delete()
"""

FIRST_CALL = """
start, begun, go_on = threading.Thread.start, threading.Event(), threading.Event()

def slowly(thread):
    if thread.name == "attnserve-deadlines":
        begun.set()
        assert go_on.wait(patience)
    start(thread)

threading.Thread.start = slowly
client, answers = Client(address, timeout=None), []
caller = threading.Thread(target=lambda: answers.append(attended(client)))
caller.start()
assert begun.wait(patience)
in_child(lambda: print(refused(lambda: attended(client)), flush=True))
go_on.set()
caller.join()
assert answers == [1]
"""

LET_GO = """
clients = [Client(address, timeout=None, transport=transport) for transport in ("stream", "unary")]
assert [attended(client) for client in clients] == [1, 1]

def child():
    while clients:
        print(refused(lambda: attended(clients[0])), flush=True)
        del clients[0]
        gc.collect()

in_child(child)
assert [attended(client) for client in clients] == [1, 1]
"""

GIVEN_UP = """
import socket

silent = socket.create_server(("127.0.0.1", 0))
silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
clients = [Client(silent_address, timeout=None, transport=transport) for transport in ("stream", "unary")]
futures = [client.submit(array, array, array) for client in clients]
(call,) = clients[1]._calls._unary._calls
taken, given_back = threading.Event(), threading.Event()

def hold():
    with call.rpc._state.condition:  # gRPC's own lock
        taken.set()
        assert given_back.wait(patience)

holder = threading.Thread(target=hold)
holder.start()
assert taken.wait(patience)

def child():
    for client, future in zip(clients, futures):
        assert future.cancel()
        assert future.cancel()
        assert not wait([future], patience).not_done
        print(refused(lambda: attended(client)), flush=True)

in_child(child)
given_back.set()
holder.join()
assert not any(future.done() for future in futures)
for client in clients:
    client.close()
"""

IN_TASKS = """
loop = asyncio.new_event_loop()

async def use(transport):
    client = AsyncClient(address, timeout=None, transport=transport)
    assert await awaited(client) == 1
    return client

clients = [loop.run_until_complete(use(transport)) for transport in ("stream", "unary")]

async def use_own():
    async with AsyncClient(address, timeout=None) as own:
        assert await awaited(own) == 1

def child():
    for client in clients:
        print(refused(lambda: asyncio.run(awaited(client))), flush=True)
        print(refused(lambda: asyncio.run(client.server_info())), flush=True)
        asyncio.run(client.close())
    assert "gRPC" in refused(lambda: asyncio.run(use_own()))
    clients.clear()
    gc.collect()

in_child(child)
for client in clients:
    assert loop.run_until_complete(awaited(client)) == 1
    loop.run_until_complete(client.close())
in_child(child)
"""


@pytest.mark.parametrize("program", [USED, LOCKED, FIRST_CALL, LET_GO, GIVEN_UP, IN_TASKS])
def test_a_client_that_was_used_before_a_fork(server: Server, program: str) -> None:
    command = [sys.executable, "-c", COMMON + program, server.address, str(int(PATIENCE_S) // 2)]
    # Where a child does not need gRPC, none of it is to run there: gRPC's own fork handlers may end a child.
    environment = os.environ if program is USED else {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert all("make a client in each" in line for line in run.stdout.splitlines())
