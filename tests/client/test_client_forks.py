"""A process that forks: its child has none of the client's threads, and says so instead of waiting for ever."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from calls import PATIENCE_S
from conftest import Server

PROGRAM = """
import os, signal, sys
import numpy as np
import attnserve

def attended(client):
    return client.attend(*[np.ones((2, 3), np.float32)] * 3).output[0, 0]

used, unused = attnserve.Client(sys.argv[1], timeout=None), attnserve.Client(sys.argv[1], timeout=None)
assert attended(used) == 1
child = os.fork()
if not child:
    signal.alarm(int(sys.argv[2]))  # ends the child, whatever it waits for
    status = 1
    try:
        future = used.submit(*[np.ones((2, 3), np.float32)] * 3)
    except attnserve.ClientClosedError as error:
        used.close()
        with attnserve.Client(sys.argv[1], timeout=None) as own:
            assert attended(own) == attended(unused) == 1
        print(error, flush=True)
        status = 0
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
assert attended(used) == 1
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_client_that_was_used_before_a_fork(server: Server) -> None:
    command = [sys.executable, "-c", PROGRAM, server.address, str(int(PATIENCE_S) // 2)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    assert "make a client in each" in run.stdout
