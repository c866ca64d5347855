"""A little fuzzing in every test run; `make fuzz` does more. Tests for the findings of both are here too."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import calls
import grpc
import pytest
from conftest import Models, Server
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from random_codec import Inputs, check
from random_service import FLAGS, Attack, Finding, ask
from sound import METHODS, PLAIN_CACHE

FEW = [name for name in METHODS if name not in ("LayerService/Load", "LayerService/Unload")]


@pytest.fixture(scope="module")
def attacked(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that must survive all attacks with an empty error log."""
    flags = (*FLAGS, "--layers", str(models.directory / "layers.toml"))
    server = Server(flags, tmp_path_factory.mktemp("attacked") / "stderr")
    yield server
    assert server.stop() == 0
    assert server.stderr() == ""


@pytest.fixture(scope="module")
def channel(attacked: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(attacked.address) as channel:
        yield channel


def test_the_codec_under_any_bytes() -> None:
    taken = 0
    for message_type, data in Inputs(Random(3)).take(4000):
        check(message_type, data)
        taken += 1
    assert taken == 4000


def test_a_server_under_any_bytes(channel: grpc.Channel) -> None:
    attack = Attack(channel, Random(5))
    attack.run(3000)
    codes = {code.rpartition(" ")[2] for code in attack.codes}
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= codes
    assert {method for method in METHODS if attack.sent[method]} >= set(FEW)


@settings(max_examples=4 * settings().max_examples)
@given(seed=st.integers(0, 2**64 - 1), method=st.sampled_from(FEW))
def test_any_rpc_under_mutations(channel: grpc.Channel, seed: int, method: str) -> None:
    """A seed is all that hypothesis draws: what follows depends on the names that the server gives to caches, too."""
    attack = Attack(channel, Random(seed))
    attack.send(method, attack.input(method))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.INTERNAL, "an error"),
        (grpc.StatusCode.UNKNOWN, ""),
        (grpc.StatusCode.INVALID_ARGUMENT, 'File "/usr/lib/x.py", line 3'),
        (grpc.StatusCode.NOT_FOUND, "there is no /home/somebody/layers.toml"),
        (grpc.StatusCode.NOT_FOUND, "SECRET-FINGERPRINT"),
    ],
)
def test_the_judge_lets_nothing_pass(channel: grpc.Channel, code: grpc.StatusCode, message: str) -> None:
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="SOME"))
    with pytest.raises(Finding):
        Attack(channel, Random(0))._judge("AttentionService/Attend", b"", code, status, message)


def test_lifetimes_beyond_all_time(channel: grpc.Channel) -> None:
    """Found by fuzzing: such a cache was created, and then its lifetime could not be reported."""
    name = ask(channel, "CacheService/Create", **PLAIN_CACHE).cache.name
    for ttl, field in (
        ({"seconds": 2**63 - 1}, "ttl.seconds"),
        ({"seconds": -(2**63)}, "ttl.seconds"),
        ({"seconds": 315_576_000_001}, "ttl.seconds"),
        ({"seconds": 1, "nanos": 2**31 - 1}, "ttl.nanos"),
        ({"seconds": 1, "nanos": -1}, "ttl.nanos"),
        ({"seconds": -1}, "ttl"),
        ({}, "ttl"),
    ):
        for method, fields in (("Create", PLAIN_CACHE), ("Fork", {"names": [name]})):
            with pytest.raises(grpc.RpcError) as caught:
                ask(channel, f"CacheService/{method}", **fields, ttl=ttl)
            bad = calls.detail(calls.status_of(caught.value), error_details_pb2.BadRequest)
            assert [violation.field for violation in bad.field_violations] == [field]
    fork = ask(channel, "CacheService/Fork", names=[name], ttl={"seconds": 315_576_000_000}).caches[0]
    assert fork.ttl.seconds == 315_576_000_000
