"""The end of the interpreter while a client lives, and of an event loop right after its client was closed: in processes
of their own, which print no errors.

An interpreter that ends runs finalizers of what lives until then when the client's threads run no more; they get an
error instead of hanging.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from calls import PATIENCE_S
from conftest import Server

PROGRAM = """
import sys
import numpy as np
from attnserve import Client, ClientClosedError

ARRAY = np.ones((1, 2, 3), np.float32)

class Owner:
    def __init__(self, address, transport):
        # The span of a call that a finalizer cancels is always left to another thread.
        self.client = Client(address, timeout=None, transport=transport, tracing=True)
        self.cache = self.client.create_cache(1, 3)
        self.call()
        long = np.ones((8, 4096, 64), np.float32)
        self.late = self.client.submit(long, long, long)

    def call(self):
        return self.client.attend(ARRAY, ARRAY, ARRAY)

    def submit(self):
        return self.client.submit(ARRAY, ARRAY, ARRAY)

    def cancel(self):
        self.late.cancel()

    def delete(self):
        self.cache.delete()

    def close(self):
        self.client.close()

    def __del__(self, last=sys.argv[3], refusal=ClientClosedError, write=sys.stdout.write, flush=sys.stdout.flush):
        try:
            getattr(self, last)()
            write("done")
        except refusal as error:
            write(str(error))
        flush()

owner = Owner(*sys.argv[1:3])  # which lives as long as its module
"""


@pytest.mark.parametrize("last", ["call", "submit", "cancel", "delete", "close"])
@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_what_a_finalizer_does_last(server: Server, transport: str, last: str) -> None:
    command = [sys.executable, "-c", PROGRAM, server.address, transport, last]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stderr) == (0, "")
    expected = "done" if last in ("cancel", "close") else "the interpreter is ending"
    assert expected in run.stdout


LOOPS = """
import asyncio, sys
import numpy as np
from attnserve import AsyncClient
from attnserve._transports import tasks

ARRAY = np.ones((1, 2, 3), np.float32)
tasks._FAREWELL_S = 60.0  # however busy the machine is

LARGE = np.ones((1, 2, 256, 16), np.float32)

async def use(address, transport, last):
    client = AsyncClient(address, transport=transport)
    kept.append(client)
    async with client:
        await client.attend(ARRAY, ARRAY, ARRAY)
        futures = [client.submit(LARGE, LARGE, LARGE) for _ in range(4 if last != "reply" else 0)]
        for _ in range(5):
            await asyncio.sleep(0)  # so that they are sent
        if last == "cancel":
            for future in futures:
                future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)

kept = []
for _ in range(20):
    asyncio.run(use(*sys.argv[1:]))
print("done")
"""


@pytest.mark.parametrize("last", ["reply", "cancel", "close"])
@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_one_loop_after_another(server: Server, transport: str, last: str) -> None:
    """In a loop, gRPC prints an error if events of calls of an earlier one, which is closed, reach it: of calls that
    closing the client gave up, or that were cancelled just before.
    """
    command = [sys.executable, "-c", LOOPS, server.address, transport, last]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
