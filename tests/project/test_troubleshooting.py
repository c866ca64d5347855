"""docs/troubleshooting.md: what it quotes is what a real server and the SDK say."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import calls
import grpc
import numpy as np
import pytest
from certificates import Authority
from conftest import POOL, Server

from attnserve import TLS, AttnServeError, Client
from attnserve.v1 import attention_pb2, attention_pb2_grpc, tensor_pb2
from attnserve_server.access.tokens import digest, format_hash, new_token

TEXT, OPERATIONS = (
    (Path(__file__).resolve().parents[2] / "docs" / f"{name}.md").read_text("utf-8")
    for name in ("troubleshooting", "operations")
)
ONE = np.zeros((1, 1, 2), np.float32)

Attempt = Callable[[], object]


def quoted(section: str) -> list[str]:
    """The phrases in the first column of a section's table."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    columns = re.findall(r"^\| (`[^|]+`)", text, re.MULTILINE)
    phrases = [phrase for column in columns for phrase in re.findall("`([^`]+)`", column)]
    assert phrases
    return phrases


def said(attempts: list[Attempt]) -> list[str]:
    """What attempts fail with, all at the same time: some take seconds."""

    def failure(attempt: Attempt) -> str:
        with pytest.raises((AttnServeError, ValueError, grpc.RpcError)) as caught:
            attempt()
        return str(caught.value)

    with ThreadPoolExecutor(len(attempts)) as threads:
        return list(threads.map(failure, attempts))


def unknown(section: str, messages: list[str]) -> list[str]:
    """The phrases that are in none of the messages."""
    return [phrase for phrase in quoted(section) if not any(phrase in message for message in messages)]


def attend(address: str, tls: TLS | None = None) -> Attempt:
    def attempt() -> None:
        with Client(address, tls=tls, retries=0) as client:
            client.attend(ONE, ONE, ONE)

    return attempt


def test_clients_that_do_not_get_through(start_server: Callable[..., Server], tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    files = authority.issue_for_server()
    certificate = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    plain = start_server("--device", "cpu")
    secure = start_server("--device", "cpu", *certificate, "--tls-client-ca", str(authority.ca), "--http-tls=true")
    other_service = grpc.server(ThreadPoolExecutor(1))
    other_port = other_service.add_insecure_port("127.0.0.1:0")
    other_service.start()
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))  # has a port, and does not listen
        *messages, uncertified = said(
            [
                *(attend(f"127.0.0.1:{each.getsockname()[1]}") for each in (closed, silent)),
                attend(plain.http_address),
                attend(secure.http_address, TLS(ca=authority.ca)),
                attend(secure.address),
                attend(plain.address, TLS(ca=authority.ca)),
                attend(secure.address, TLS(ca=other.ca)),
                attend(secure.address, TLS(authority.ca, files.certificate, files.key, "elsewhere")),
                attend(f"127.0.0.1:{other_port}"),
                attend(secure.address, TLS(ca=authority.ca)),
            ]
        )
    other_service.stop(None).wait()
    assert "Socket closed" in uncertified
    # Two depend on the moment at which gRPC gives up, and two on the machine's name servers. A server that drains is in
    # tests/server/test_server.py.
    untested = ["connect() timed out", "tcp handshaker shutdown", "backend unhealthy"]
    untested += ["errors resolving", "Name or service not known"]
    assert sorted(unknown("A client does not get through", messages)) == sorted(untested)


def test_calls_that_are_refused(start_server: Callable[..., Server], tmp_path: Path) -> None:
    token = new_token()
    somebody = f'[[tokens]]\nname = "somebody"\nroles = ["layers"]\nhash = "{format_hash(digest(token))}"\n'
    (tmp_path / "callers.toml").write_text(somebody)
    server = start_server("--device", "cpu", "--max-message-bytes", "16MiB", "--max-request-flops", "1000000")
    callers = ("--callers", str(tmp_path / "callers.toml"))
    closed = start_server("--device", "cpu", *callers, "--layer-administration=false")

    def stock() -> None:
        def tensor(length: int) -> tensor_pb2.Tensor:
            zeros = np.zeros((length, 64), np.float32)
            return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=zeros.shape, data=zeros.tobytes())

        request = attention_pb2.AttendRequest(query=tensor(20_000), key=tensor(1), value=tensor(1))
        with grpc.insecure_channel(server.address) as channel:
            attention_pb2_grpc.AttentionServiceStub(channel).Attend(request)

    def fill() -> None:
        with client.create_cache(1, 2, layers=129) as cache:  # 64 MiB are 128 pages
            for layer in range(129):
                cache.append(ONE, ONE, layer=layer)

    with Client(server.address, retries=0) as client, Client(closed.address, token=token) as known:
        long, costly = np.zeros((1, 100_000, 64), np.float32), np.zeros((1, 256, 64), np.float32)
        wide = np.zeros((1, 0, 5_000_000), np.float32)  # values, of which an output would have the width
        messages = said(
            [
                lambda: client.attend(long, long, long),
                lambda: client.attend(ONE, ONE[:, :0], wide),
                lambda: client.attend(costly, costly, costly),
                stock,
                lambda: client.attend(ONE, ONE, ONE, mask=np.zeros((1, 1), np.float32)),
                attend(closed.address),
                lambda: Client("192.0.2.1:8001", token="secret"),
                fill,
                lambda: client.layers.load("layers.toml"),
                lambda: known.layers.load("layers.toml"),
            ]
        )
    # A fork of this very process would have all servers and fixtures of the tests.
    program = (
        "import os, sys, numpy as np, attnserve\n"
        f"client, one = attnserve.Client({server.address!r}), np.zeros((1, 1, 2), np.float32)\n"
        "client.attend(one, one, one)\n"
        "child = os.fork()\n"
        "if child:\n    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "try:\n    client.attend(one, one, one)\n"
        "except attnserve.ClientClosedError as error:\n    print(error, flush=True)\n"
        "os._exit(0)\n"
    )
    forked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert unknown("A call is refused", [*messages, forked.stdout]) == []


LIMITED = """
import resource, sys
import uvloop
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
del uvloop.loop.libuv_get_loop_t_ptr
from attnserve_server.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""A server that may have few connections, and a uvloop that does not tell how long its loop waits."""


def test_a_server_without_file_descriptors(tmp_path: Path) -> None:
    server = Server(("--device", "cpu", *POOL), tmp_path / "stderr", ("-c", LIMITED))

    def is_well() -> bool:
        try:
            return calls.get(server.http_address, "/healthz")[0] == 200
        except OSError:  # it closes what comes until it has seen that others are closed
            return False

    host, _, port = server.address.rpartition(":")  # the HTTP port would not take so many
    try:
        with ExitStack() as connections:
            for _ in range(250):
                connections.enter_context(socket.create_connection((host, int(port))))
            calls.until(lambda: "no connection can be accepted" in server.stderr(), "it has none left")
        calls.until(is_well, "it has some again")
        assert server.stop() == 0
    finally:
        server.process.kill()
    log = server.stderr()
    assert unknown("The server's log says", [log]) == []
    assert "Traceback" not in log
    assert log.count("no connection can be accepted") < 20  # one a second; at once, a hundred cannot be
    (told,) = re.findall("does not answer scrapes.+`(no connection[^`]+)`", OPERATIONS)  # Prometheus is not answered
    assert told in log


def test_servers_that_do_not_start(server: Server) -> None:
    def failure(flags: tuple[str, ...], status: int) -> str:
        command = [sys.executable, "-m", "attnserve_server", "--http-listen", "127.0.0.1:0", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done.stderr.splitlines()[-1]

    wrong = {
        ("--listen", "0.0.0.0:0"): 2,
        ("--http-listen", "0.0.0.0:0"): 2,
        ("--listen", server.address): 1,
        ("--listen", "127.0.0.1:0", "--device", "cuda:99"): 1,
    }
    with ThreadPoolExecutor(len(wrong)) as threads:
        messages = list(threads.map(failure, wrong.keys(), wrong.values()))
    assert unknown("The server does not start", messages) == []
