"""Waiting for a server that has not started yet, or is not ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import calls
import pytest

from attnserve import AsyncClient, Client, DeadlineExceededError
from attnserve._commands import cli
from attnserve._errors import UnavailableError
from attnserve._health import Patience

if TYPE_CHECKING:
    from conftest import Server


async def wait_in_a_task(address: str, timeout: float) -> bool:
    async with AsyncClient(address) as client:
        await client.wait_until_ready(timeout=timeout)
        return await client.is_ready()


def wait_in_a_thread(address: str, timeout: float) -> bool:
    with Client(address) as client:
        client.wait_until_ready(timeout=timeout)
        return client.is_ready()


def test_a_server_that_starts_meanwhile(
    start_server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{tmp_path}/socket"
    with ThreadPoolExecutor() as threads:
        waiting = [
            threads.submit(wait_in_a_thread, address, calls.PATIENCE_S),
            threads.submit(lambda: asyncio.run(wait_in_a_task(address, calls.PATIENCE_S))),
            threads.submit(cli.main, ["health", address, "--wait", str(calls.PATIENCE_S)]),
        ]
        start_server("--listen", address)
        assert [each.result(calls.PATIENCE_S) for each in waiting] == [True, True, 0]
    assert capsys.readouterr().out == "ready\n"


@pytest.mark.parametrize("wait", [wait_in_a_thread, lambda *arguments: asyncio.run(wait_in_a_task(*arguments))])
def test_one_that_does_not(wait: Callable[[str, float], bool], tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"the server is not ready after 0\.3 s: "):
        wait(f"unix:{tmp_path}/socket", 0.3)
    assert time.monotonic() - begin < calls.PATIENCE_S


def test_questions_become_rare() -> None:
    patience = Patience(None)
    assert patience.left is None
    pauses = [patience.pause(None) for _ in range(20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.05, 1.0)
    assert 0 < Patience(0.02).pause(None) <= 0.02, "no longer than is left"
    over = Patience(0.0)
    assert over.left is not None
    assert over.left > 0, "gRPC takes no other timeout"
    with pytest.raises(DeadlineExceededError, match="it says that it is not"):
        over.pause(None)
    with pytest.raises(DeadlineExceededError, match="nobody"):
        over.pause(UnavailableError("nobody"))
