"""`make demo`: it runs, agrees with itself, and reads the service's metrics correctly."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from conftest import Server

from attnserve import Client

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "always::ResourceWarning", str(EXAMPLES / "embed_sentences.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_demo_with_a_service_of_its_own() -> None:
    demo = run()
    assert demo.returncode == 0, demo.stderr
    assert "ranking           the same" in demo.stdout
    difference = re.search(r"largest difference (\S+),", demo.stdout)
    assert difference is not None
    assert 0 < float(difference[1]) <= 1e-5  # exactly 0 would mean that the service was not used
    assert "24 attention calls over the wire" in demo.stdout
    assert "requests          24 OK" in demo.stdout
    resident = re.search(r"the whole model there +4 .* KiB +.* KiB +.* ms +(\S+)\n", demo.stdout)
    assert resident is not None
    assert 0 < float(resident[1]) <= 1e-5
    assert "exit status 0" in demo.stdout
    assert "ResourceWarning" not in demo.stderr
    assert max(map(len, demo.stdout.splitlines())) <= 100


def test_demo_with_a_running_service(server: Server, client: Client) -> None:
    """Its counts cover only its own run, however much the service has done before."""
    for causal in (False, True):
        client.attend(*np.ones((3, 2, 4, 8), np.float32), causal=causal)
    demo = run("--address", server.address, "--http-address", server.http_address)
    assert demo.returncode == 0, demo.stderr
    assert "requests          24 OK" in demo.stdout
    assert "that service holds no layer 'minilm'" in demo.stdout


def test_demo_with_what_is_no_address_and_without_a_service() -> None:
    """At the same time: each imports for seconds."""
    nowhere = "127.0.0.1:9"
    with ThreadPoolExecutor(2) as threads:
        wrong = threads.submit(run, "--address", "8001")
        alone = threads.submit(run, "--address", nowhere, "--http-address", nowhere).result()
    demo = wrong.result()
    assert demo.returncode == 2
    expected = "embed_sentences.py: error: argument --address: expected host:port, "
    assert demo.stderr.splitlines()[-1].startswith(expected), demo.stderr
    assert alone.returncode == 1
    assert alone.stderr.startswith(f"embed_sentences: no metrics at http://{nowhere}/metrics")
    assert "Traceback" not in alone.stderr
