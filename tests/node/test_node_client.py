"""A client in another language with other implementations of gRPC and protobuf (grpc-js, protobuf.js): the unchanged
Node example against the real server.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import IO, Any

import accuracy
import certificates
import grpc
import numpy as np
import oracle
import psutil  # type: ignore[import-untyped]
import pytest
import strategies
from cases import Case, Plan
from conftest import POOL, Server
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import array

from attnserve._requests.attend import encode_attend
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.tokens import digest, format_hash, new_token
from benchmarks.chaos import faulty
from scripts import protos

EXAMPLE = protos.ROOT / "examples" / "node"
PEER = Path(__file__).parent / "peer.mjs"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def node() -> str:
    """The path of node, with the example's packages and the protocol's descriptors in place."""
    path = shutil.which("node")
    if path is None or not (EXAMPLE / "node_modules").is_dir():
        reason = "there is no node" if path is None else "the example for Node has no packages: make node"
        if os.environ.get("REQUIRE_NODE"):
            pytest.fail(reason)
        pytest.skip(reason)
    assert protos.main("descriptors", str(protos.ROOT / "build" / "attnserve.binpb")) == 0
    return path


class Peer:
    """A process that calls a server with the example's client."""

    def __init__(self, node: str, *arguments: str) -> None:
        command = [node, str(PEER), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._numbers = count(1)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def ask(self, *requests: pb.AttendRequest, alone: bool = False) -> list[Any]:
        """Makes concurrent calls; returns the replies, or the errors' contents as dictionaries."""
        assert self._process.stdin is not None
        places = {next(self._numbers): place for place in range(len(requests))}
        for number, request in zip(places, requests, strict=True):
            asked = json_format.MessageToDict(request, preserving_proto_field_name=True)
            self._process.stdin.write(json.dumps({"id": number, "alone": alone, "request": asked}) + "\n")
        self._process.stdin.flush()
        found: dict[int, Any] = {}
        for _ in requests:
            answer = json.loads(self._answers.get(timeout=PATIENCE_S))
            reply = answer.get("error")
            if "reply" in answer:
                reply = json_format.ParseDict(answer["reply"], pb.AttendResponse(), ignore_unknown_fields=True)
            found[places[answer["id"]]] = reply
        return [found[place] for place in range(len(requests))]

    def close(self) -> int:
        """Ends the process; returns its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            return self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._reader.join()
            self._process.stdout.close()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)


@pytest.fixture
def ask_by(node: str) -> Iterator[Callable[..., Peer]]:
    """Starts peers, which must exit with status 0."""
    peers: list[Peer] = []

    def start(*arguments: str) -> Peer:
        peers.append(Peer(node, *arguments))
        return peers[-1]

    yield start
    assert [peer.close() for peer in peers] == [0] * len(peers)


@pytest.fixture(scope="module")
def peer(node: str, server: Server) -> Iterator[Peer]:
    """A peer of the shared server."""
    peer = Peer(node, server.address)
    yield peer
    assert peer.close() == 0


def test_the_example_does_what_it_says(node: str, server: Server) -> None:
    command = [node, str(EXAMPLE / "attend.mjs"), server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("attnserve ")
    assert said[1].startswith("100 on a stream")
    assert float(said[2].removeprefix("difference from the definition:")) < 1e-6
    assert said[3] == "a cache of 510 tokens, after 10 steps"
    assert said[4].startswith("INVALID_FIELD: value.shape:")
    assert said[5].startswith("UNEXPECTED_LENGTH:")
    assert not done.stderr


def test_the_example_says_that_there_is_no_server(node: str) -> None:
    command = [node, str(EXAMPLE / "attend.mjs"), "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("attend: ")


def request_of(case: Case, **more: Any) -> pb.AttendRequest:
    """The request for a case."""
    call = encode_attend(case.query, case.key, case.value, **case.arguments, **more)
    return pb.AttendRequest.FromString(b"".join(call.pieces))


@settings(max_examples=max(15, settings().max_examples // 3))
@given(
    plan=strategies.plans(), seed=strategies.SEEDS, lse=st.booleans(), scores=st.sampled_from([None, *oracle.STAGES])
)
def test_random_combinations(peer: Peer, plan: Plan, seed: int, lse: bool, scores: str | None) -> None:
    """Any kind of request, as protobuf.js writes it, on a stream and as a unary call."""
    case = plan.case(seed)
    request = request_of(case, return_lse=lse, return_scores=scores)
    for reply in (*peer.ask(request), *peer.ask(request, alone=True)):
        assert isinstance(reply, pb.AttendResponse), reply
        assert (reply.HasField("lse"), reply.HasField("scores")) == (lse, scores is not None)
        parts = {name: array(getattr(reply, name)) for name in ("output", "lse", "scores") if reply.HasField(name)}
        accuracy.check(case, SimpleNamespace(**{"lse": None, "scores": None, **parts}), scores)


def test_everyone_gets_their_own_of_many_at_once(peer: Peer) -> None:
    rng = np.random.default_rng(0)
    cases = [
        Case(*(rng.standard_normal((2, length, 16), np.float32) for _ in range(3)))
        for length in rng.integers(1, 200, 300)
    ]
    for case, reply in zip(cases, peer.ask(*map(request_of, cases)), strict=True):
        accuracy.check(case, SimpleNamespace(output=array(reply.output), lse=None, scores=None))


def test_messages_of_many_megabytes(peer: Peer) -> None:
    """Larger than HTTP/2's flow-control windows, both ways."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((4, length, 256), np.float32) for length in (4000, 3, 3))
    case = Case(query, key, value)
    for reply in (*peer.ask(request_of(case)), *peer.ask(request_of(case), alone=True)):
        accuracy.check(case, SimpleNamespace(output=array(reply.output), lse=None, scores=None))


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_wrong_is_said_and_others_go_on(peer: Peer, alone: bool) -> None:
    case = Plan().case(0)
    wrong = request_of(case)
    wrong.key.data = wrong.key.data[:-1]
    first, error, last = peer.ask(request_of(case), wrong, request_of(case), alone=alone)
    assert error["code"] == 3
    assert (error["reason"], error["field"]) == ("INVALID_FIELD", "key.data")
    assert first.output == last.output
    accuracy.check(case, SimpleNamespace(output=array(first.output), lse=None, scores=None))


def test_a_fault_of_the_server_has_its_id_in_the_log(ask_by: Callable[..., Peer], tmp_path: Path) -> None:
    request = request_of(Plan().case(0))
    query = array(request.query).copy()
    query.flat[0] = faulty.FAULTS["kernel"]
    request.query.data = query.tobytes()
    server = Server((*POOL, "--log-format", "json"), tmp_path / "stderr", program=(faulty.__file__,))
    try:
        asker = ask_by(server.address)
        errors = [*asker.ask(request), *asker.ask(request, alone=True)]
        assert asker.close() == 0
    finally:
        status = server.stop()
    assert status == 0
    lines = [json.loads(line) for line in server.stderr().splitlines()]
    logged = [line["request_id"] for line in lines if "request_id" in line]
    assert [error.get("requestId") for error in errors] == logged


def test_it_leaves_a_stream_when_it_is_asked_to(
    start_server: Callable[..., Server], ask_by: Callable[..., Peer]
) -> None:
    server = start_server(
        "--max-connection-age", "300ms", "--drain-grace", f"{PATIENCE_S}s"
    )  # a client that stays is cut off after that
    peer, case = ask_by(server.address), Plan().case(0)
    request, connections, process = request_of(case), set[Any](), psutil.Process(server.process.pid)
    deadline = monotonic() + PATIENCE_S
    while len(connections) < 4:
        assert monotonic() < deadline
        for reply in peer.ask(*[request] * 20):
            assert isinstance(reply, pb.AttendResponse), reply
        port = int(server.address.rpartition(":")[2])
        connections |= {each.raddr for each in process.net_connections("tcp") if each.laddr.port == port and each.raddr}
    accuracy.check(case, SimpleNamespace(output=array(reply.output), lse=None, scores=None))


def test_replies_that_nobody_waits_for(ask_by: Callable[..., Peer]) -> None:
    """They are skipped, and the waiting calls get theirs."""

    def stream(messages: Iterator[bytes], context: object) -> Iterator[bytes]:
        for message in messages:
            ids = [call.id for call in pb.AttendStreamRequest.FromString(message).calls]
            replies = [pb.AttendStreamReply(id=id, attend=pb.AttendResponse()) for id in (99, *ids, *ids)]
            yield pb.AttendStreamResponse(replies=replies).SerializeToString()

    method = {"AttendStream": grpc.stream_stream_rpc_method_handler(stream)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attnserve.v1.AttentionService", method),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        asker = ask_by(f"127.0.0.1:{port}")
        assert asker.ask(*[request_of(Plan().case(0))] * 3) == [pb.AttendResponse()] * 3
        assert asker.close() == 0
    finally:
        server.stop(None).wait()


def test_tls_and_tokens(start_server: Callable[..., Server], ask_by: Callable[..., Peer], tmp_path: Path) -> None:
    authority = certificates.Authority(tmp_path)
    files = authority.issue_for_server("server")
    token = new_token()
    callers = tmp_path / "callers.toml"
    callers.write_text(f'[[tokens]]\nname = "node"\nroles = ["use"]\nhash = "{format_hash(digest(token))}"\n')
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--callers", str(callers))
    server, request = start_server(*flags), request_of(Plan().case(0))
    (reply,) = ask_by(server.address, str(authority.ca), token).ask(request)
    assert isinstance(reply, pb.AttendResponse), reply
    for alone in (False, True):
        (error,) = ask_by(server.address, str(authority.ca), new_token()).ask(request, alone=alone)
        assert error["reason"] == "UNKNOWN_TOKEN"


def test_a_token_is_not_sent_without_tls(node: str) -> None:
    done = subprocess.run(
        [node, str(PEER), "127.0.0.1:1", "", "secret"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0
    assert "token: expected rootCertificate" in done.stderr
