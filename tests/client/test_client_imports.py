"""Importing the SDK is light: it imports neither torch nor the server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import attnserve


def test_neither_torch_nor_the_server_is_imported() -> None:
    program = "import attnserve, attnserve._commands.cli, json, sys; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    roots = {name.partition(".")[0] for name in json.loads(output.stdout)}
    assert "attnserve" in roots
    assert not roots & {"torch", "attnserve_server", "transformers", "prometheus_client"}


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_an_integration_says_what_to_install(missing: str) -> None:
    program = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "try: import attnserve.integrations.transformers\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "pip install 'attnserve[transformers]'" in done.stdout
    assert missing in done.stdout.partition("(")[2]


def test_the_public_names_are_there() -> None:
    assert sorted(attnserve.__all__, key=str) == sorted(set(attnserve.__all__))
    for name in attnserve.__all__:
        assert hasattr(attnserve, name)


def test_a_client_that_is_not_closed_does_not_keep_the_process() -> None:
    """Daemon threads and a channel are left behind, with a call in flight to a server that is not there."""
    program = (
        "import numpy, attnserve\n"
        "client = attnserve.Client('127.0.0.1:9', retries=100)\n"
        "client.submit(*[numpy.ones((2, 2), numpy.float32)] * 3)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
