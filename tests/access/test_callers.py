"""Access control on the real server: tokens, roles and ownership."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import calls
import grpc
import messages
import numpy as np
import pytest
from google.rpc import error_details_pb2

from attnserve import AsyncClient, Client, NotFoundError, OverloadedError, PermissionDeniedError, Token
from attnserve.v1 import attention_pb2, caches_pb2, layers_pb2
from attnserve_server.access.tokens import digest, format_hash, new_token

if TYPE_CHECKING:
    from conftest import Server

Code = grpc.StatusCode

ROLES_OF_METHODS = {
    "AttentionService.Attend": {"use"},
    "AttentionService.Apply": {"use"},
    "AttentionService.AttendStream": {"use"},
    "AttentionService.ServerInfo": {"use", "layers", "metrics"},
    "LayerService.List": {"use", "layers"},
    "LayerService.Get": {"use", "layers"},
    "LayerService.Load": {"layers"},
    "LayerService.Unload": {"layers"},
    "CacheService.Create": {"use"},
    "CacheService.Get": {"use"},
    "CacheService.List": {"use"},
    "CacheService.Append": {"use"},
    "CacheService.Fork": {"use"},
    "CacheService.Truncate": {"use"},
    "CacheService.Delete": {"use"},
}
METHODS = {
    f"{service.name}.{method.name}": method
    for module in (attention_pb2, layers_pb2, caches_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
T = TypeVar("T")

QUERY = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)


def entry(name: str, token: str, *roles: str) -> str:
    """A token's entry in the callers file."""
    shown = ", ".join(f'"{role}"' for role in roles)
    return f'[[tokens]]\nname = "{name}"\nroles = [{shown}]\nhash = "{format_hash(digest(token))}"\n'


@dataclass(frozen=True)
class Guarded:
    """A server, and its callers' tokens by name."""

    server: Server
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    from conftest import Server

    directory = tmp_path_factory.mktemp("guarded")
    roles = {"ann": ["use"], "bob": ["use"], "admin": ["layers"], "prometheus": ["metrics"]}
    tokens = {name: new_token() for name in roles}
    (directory / "callers.toml").write_text("".join(entry(name, tokens[name], *roles[name]) for name in roles))
    flags = ("--callers", str(directory / "callers.toml"), "--model-directory", str(directory))
    server = Server(flags, directory / "stderr")
    yield Guarded(server, tokens)
    assert server.stop() == 0, server.stderr()
    for secret in (*tokens.values(), *(digest(token).hex() for token in tokens.values())):
        assert secret not in server.stderr() + str(server.startup)


@pytest.fixture(scope="module")
def channel(guarded: Guarded) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.server.address) as channel:
        yield channel


def outcome(channel: grpc.Channel, method: str, authorization: str | bytes | None) -> tuple[Code, str]:
    """The status code of an RPC with an empty request, and the reason given."""
    descriptor = METHODS[method]
    path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
    metadata: Any = () if authorization is None else (("authorization", authorization),)
    call: Any
    if descriptor.client_streaming:
        call = channel.stream_stream(path)(iter([b""]), timeout=calls.PATIENCE_S, metadata=metadata)
        with suppress(grpc.RpcError):  # its status is checked below
            list(call)
    else:
        call = channel.unary_unary(path).future(b"", timeout=calls.PATIENCE_S, metadata=metadata)
    if call.code() is Code.OK:
        return Code.OK, ""
    return call.code(), calls.detail(calls.status_of(call), error_details_pb2.ErrorInfo).reason


@pytest.mark.parametrize("method", METHODS)
def test_every_method_asks_who_calls_and_what_they_may_do(guarded: Guarded, channel: grpc.Channel, method: str) -> None:
    assert outcome(channel, method, None) == (Code.UNAUTHENTICATED, "NO_TOKEN")
    assert outcome(channel, method, f"Bearer {new_token()}") == (Code.UNAUTHENTICATED, "UNKNOWN_TOKEN")
    for name, role in (("ann", "use"), ("admin", "layers"), ("prometheus", "metrics")):
        code, reason = outcome(channel, method, f"Bearer {guarded.tokens[name]}")
        if role in ROLES_OF_METHODS[method]:
            assert code not in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.INTERNAL), (name, reason)
        else:
            assert (code, reason) == (Code.PERMISSION_DENIED, "ROLE_MISSING"), name


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        ("", "NO_TOKEN"),
        ("Bearer", "NO_TOKEN"),
        ("Basic YW5uOmFubg==", "NO_TOKEN"),
        ("Bearer ", "UNKNOWN_TOKEN"),
        ("Bearer x", "UNKNOWN_TOKEN"),
        ("Bearer " + 4000 * "x", "UNKNOWN_TOKEN"),
        ("Bearer sha256:" + 64 * "0", "UNKNOWN_TOKEN"),
    ],
)
def test_what_is_no_token(channel: grpc.Channel, authorization: str, reason: str) -> None:
    assert outcome(channel, "AttentionService.ServerInfo", authorization) == (Code.UNAUTHENTICATED, reason)


def test_a_hash_is_no_token_nor_is_a_part_of_one(guarded: Guarded, channel: grpc.Channel) -> None:
    token = guarded.tokens["ann"]
    for wrong in (digest(token).hex(), format_hash(digest(token)), token[:-1], token + "x", token.upper()):
        answer = outcome(channel, "AttentionService.ServerInfo", f"Bearer {wrong}")
        assert answer == (Code.UNAUTHENTICATED, "UNKNOWN_TOKEN")
    assert outcome(channel, "AttentionService.ServerInfo", f"bearer  {token}") == (Code.OK, "")


def test_health_is_for_everybody(channel: grpc.Channel) -> None:
    reply = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=calls.PATIENCE_S)
    assert reply == b"\x08\x01"  # SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_is_for_those_who_are_known(guarded: Guarded, channel: grpc.Channel, version: str) -> None:
    """Whatever their role. Others are refused before they have sent anything."""
    call: Any = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    for token in guarded.tokens.values():
        metadata = (("authorization", f"Bearer {token}"),)
        assert len(list(call(iter([b"\x3a\0"]), timeout=calls.PATIENCE_S, metadata=metadata))) == 1
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    stranger = call(nothing(), timeout=calls.PATIENCE_S)
    assert stranger.code() is Code.UNAUTHENTICATED
    over.set()


def test_the_sdk_says_who_calls(guarded: Guarded) -> None:
    for transport in ("stream", "unary"):
        with Client(guarded.server.address, transport=transport, token=guarded.tokens["ann"]) as client:
            assert client.attend(QUERY, QUERY, QUERY).output.shape == QUERY.shape
            assert str(client.server_info().settings).count(str(guarded.server.address)) == 0
        with Client(guarded.server.address, transport=transport, token=new_token()) as client:
            with pytest.raises(PermissionDeniedError) as caught:
                client.attend(QUERY, QUERY, QUERY)
            assert (caught.value.code, caught.value.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_TOKEN")


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_so_does_the_client_for_asyncio(guarded: Guarded, transport: Any) -> None:
    async with AsyncClient(guarded.server.address, transport=transport, token=guarded.tokens["ann"]) as client:
        assert (await client.attend(QUERY, QUERY, QUERY)).output.shape == QUERY.shape
    async with AsyncClient(guarded.server.address, transport=transport) as client:
        with pytest.raises(PermissionDeniedError):
            await client.attend(QUERY, QUERY, QUERY)


def test_a_cache_is_there_for_its_owner_alone(guarded: Guarded) -> None:
    address, tokens = guarded.server.address, guarded.tokens
    with Client(address, token=tokens["ann"]) as ann, Client(address, token=tokens["bob"]) as bob:
        cache = ann.create_cache(2, 8)
        cache.append(QUERY, QUERY)
        others = bob.create_cache(2, 8)
        with pytest.raises(NotFoundError):
            bob.open_cache(cache.name)
        metadata = (("authorization", f"Bearer {tokens['bob']}"),)
        key = messages.tensor(QUERY)
        reference = attention_pb2.CacheReference(name=cache.name)
        attend = attention_pb2.AttendRequest(query=messages.tensor(QUERY[None]), caches=[reference])
        with grpc.insecure_channel(address) as channel:
            for method, request in (
                ("CacheService/Get", caches_pb2.CacheServiceGetRequest(name=cache.name)),
                ("CacheService/Fork", caches_pb2.CacheServiceForkRequest(names=[cache.name])),
                ("CacheService/Truncate", caches_pb2.CacheServiceTruncateRequest(truncations=[{"name": cache.name}])),
                ("CacheService/Append", caches_pb2.CacheServiceAppendRequest(name=cache.name, key=key, value=key)),
                ("AttentionService/Attend", attend),
            ):
                call: Any = channel.unary_unary(f"/attnserve.v1.{method}")
                with pytest.raises(grpc.RpcError) as caught:
                    call(request.SerializeToString(), timeout=calls.PATIENCE_S, metadata=metadata)
                mine = calls.status_of(caught.value)
                assert caught.value.code() is Code.NOT_FOUND, method
                # The reply is the same as for a cache that does not exist.
                nobodys = "x" * len(cache.name)
                missing = request.SerializeToString().replace(cache.name.encode(), nobodys.encode())
                with pytest.raises(grpc.RpcError) as caught:
                    call(missing, timeout=calls.PATIENCE_S, metadata=metadata)
                assert calls.status_of(caught.value).message == mine.message.replace(cache.name[:4], nobodys[:4])
            stream = calls.Stream(channel, metadata)
            stream.send(calls.call(1, attend))
            assert stream.replies(1)[0].error.code == Code.NOT_FOUND.value[0]
            stream.half_close()
            assert not stream.rest()
        bob.caches.delete(cache.name)
        assert [each.name for each in bob.caches.list()] == [others.name]
        assert [each.name for each in ann.caches.list()] == [cache.name]
        assert ann.caches.get(cache.name).lengths == (3,)
        with cache.fork() as fork:
            fork.truncate(1)
            assert ann.caches.get(fork.name).lengths == (1,)
        cache.delete()
        others.delete()
        assert not ann.caches.list()


def http(guarded: Guarded, path: str, authorization: str | None) -> tuple[int, str | None, str]:
    """The HTTP port's answer: status, WWW-Authenticate header and body."""
    headers = {} if authorization is None else {"Authorization": authorization}
    request = urllib.request.Request(f"http://{guarded.server.http_address}/{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, None, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("WWW-Authenticate"), error.read().decode()


def test_metrics_are_for_those_who_may_read_them_and_health_for_all(guarded: Guarded) -> None:
    for unknown in (None, f"Bearer {new_token()}", f"Basic {guarded.tokens['prometheus']}"):
        assert http(guarded, "metrics", unknown)[:2] == (401, "Bearer")
    assert http(guarded, "metrics", f"Bearer {guarded.tokens['ann']}")[:2] == (403, None)
    status, _, text = http(guarded, "metrics", f"Bearer {guarded.tokens['prometheus']}")
    assert (status, text[:7]) == (200, "# HELP ")
    for path in ("healthz", "readyz"):
        assert http(guarded, path, None)[0] == 200


def counted(guarded: Guarded, operation: str, code: str) -> float:
    """How many requests ended so."""
    _, _, page = http(guarded, "metrics", f"Bearer {guarded.tokens['prometheus']}")
    return calls.value(page, "attnserve_requests_total", operation=operation, code=code)


@pytest.mark.parametrize(("transport", "operation"), [("stream", "attend_stream"), ("unary", "attend")])
def test_the_metrics_say_how_many_were_refused(guarded: Guarded, transport: Any, operation: str) -> None:
    before = counted(guarded, operation, "UNAUTHENTICATED"), counted(guarded, operation, "PERMISSION_DENIED")
    with (
        Client(guarded.server.address, transport=transport, token=new_token()) as unknown,
        Client(guarded.server.address, transport=transport, token=guarded.tokens["admin"]) as lacking,
    ):
        for client, times in ((unknown, 50), (lacking, 5)):
            for _ in range(times):
                with pytest.raises(PermissionDeniedError):
                    client.attend(QUERY, QUERY, QUERY)
    after = counted(guarded, operation, "UNAUTHENTICATED"), counted(guarded, operation, "PERMISSION_DENIED")
    assert (after[0] - before[0], after[1] - before[1]) == (50, 5)


def test_a_stream_that_ends_for_what_it_was_sent_is_counted(guarded: Guarded, channel: grpc.Channel) -> None:
    before = counted(guarded, "attend_stream", "INVALID_ARGUMENT")
    stream = calls.Stream(channel, (("authorization", f"Bearer {guarded.tokens['ann']}"),))
    stream.send_bytes(b"\xff")
    assert stream.error()[0] == Code.INVALID_ARGUMENT
    assert counted(guarded, "attend_stream", "INVALID_ARGUMENT") == before + 1


def until_granted(attempt: Callable[[], T]) -> T:
    """Retries until the attempt is permitted."""
    deadline = time.monotonic() + calls.PATIENCE_S
    while True:
        try:
            return attempt()
        except PermissionDeniedError:
            assert time.monotonic() < deadline, "it stayed refused"
        time.sleep(0.05)


def until_refused(attempt: Callable[[], object]) -> PermissionDeniedError:
    """Retries until the attempt is refused."""
    deadline = time.monotonic() + calls.PATIENCE_S
    while time.monotonic() < deadline:
        try:
            attempt()
        except PermissionDeniedError as error:
            return error
        time.sleep(0.05)
    raise AssertionError("it was not refused")


def test_tokens_are_replaced_without_a_restart(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """The new token works beside the old one, and then alone; a long-lived stream does not outlive its token."""
    old, new = new_token(), new_token()
    file, secret = tmp_path / "callers.toml", tmp_path / "secret"
    file.write_text(entry("ann", old, "use"))
    secret.write_text(old + "\n")
    server = start_server("--callers", str(file))
    with (
        Client(server.address, token=old) as with_old,
        Client(server.address, token=Token(file=secret)) as with_file,
        with_file.create_cache(2, 8) as cache,
    ):
        for client in (with_old, with_file):
            client.attend(QUERY, QUERY, QUERY)

        # Invalid TOML, or an empty file, as seen for a moment during an overwrite: the old entries stay in force.
        for times, text in enumerate(("[[tokens]]\nname =", ""), 1):
            file.write_text(text)
            deadline = time.monotonic() + calls.PATIENCE_S
            while server.stderr().count("the callers file was not reloaded: the callers stay as they were") < times:
                assert time.monotonic() < deadline, "it was not read"
                with_old.attend(QUERY, QUERY, QUERY)
                time.sleep(0.05)
            with_old.attend(QUERY, QUERY, QUERY)

        file.write_text(entry("ann", old, "use") + entry("ann", new, "use"))
        secret.write_text(new + "\n")
        with Client(server.address, token=new) as with_new:
            assert [each.name for each in until_granted(with_new.caches.list)] == [cache.name]
        with_old.attend(QUERY, QUERY, QUERY)

        file.write_text(entry("ann", new, "use"))
        assert until_refused(lambda: with_old.attend(QUERY, QUERY, QUERY)).reason == "UNKNOWN_TOKEN"
        assert until_refused(with_old.server_info).reason == "UNKNOWN_TOKEN"
        with_file.caches.list()
        for _ in range(3):  # not on the stream that the old token opened
            with_file.attend(QUERY, QUERY, QUERY)
        cache.append(QUERY, QUERY)

        file.write_text(entry("ann", new, "metrics"))
        assert until_refused(lambda: with_file.attend(QUERY, QUERY, QUERY)).reason == "ROLE_MISSING"
        file.write_text(entry("ann", new, "use"))  # so that the cache can be deleted
        until_granted(with_file.caches.list)
    said = server.stderr()
    assert "the callers file was reloaded" in said
    assert not re.search(f"{old}|{new}|{digest(old).hex()}", said)


@pytest.mark.parametrize("named", [False, True])
def test_callers_on_a_unix_socket_are_told_apart_by_name_alone(
    start_server: Callable[..., Server], tmp_path: Path, named: bool
) -> None:
    tokens = {name: new_token() for name in ("ann", "bob")}
    (tmp_path / "callers.toml").write_text("".join(entry(name, token, "use") for name, token in tokens.items()))
    with TemporaryDirectory() as directory:  # the path of a socket must be short
        flags = ("--listen", f"unix:{directory}/s", "--max-caller-streams", "1")
        server = start_server(*flags, *(("--callers", str(tmp_path / "callers.toml")) if named else ()))
        ann, bob = (Client(server.address, token=token if named else None, retries=0) for token in tokens.values())
        with ann, bob:
            assert ann.attend(QUERY, QUERY, QUERY).output.shape == QUERY.shape
            if named:
                assert bob.attend(QUERY, QUERY, QUERY).output.shape == QUERY.shape
            else:
                with pytest.raises(OverloadedError, match="stream"):
                    bob.attend(QUERY, QUERY, QUERY)
        assert server.stop() == 0


def test_layers_can_be_left_to_the_server_alone(start_server: Callable[..., Server], tmp_path: Path) -> None:
    flags = ("--layer-administration=false", "--reflection=false", "--model-directory", str(tmp_path))
    server = start_server(*flags)
    with Client(server.address) as client:
        assert not client.layers.list()
        for attempt in (lambda: client.layers.load("layers.toml"), lambda: client.layers.unload("some")):
            with pytest.raises(PermissionDeniedError) as caught:
                attempt()
            assert caught.value.reason == "NO_ADMINISTRATION"
            assert "layer_administration" in str(caught.value)
    with grpc.insecure_channel(server.address) as channel:
        for version in ("v1", "v1alpha"):
            call: Any = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([b"\x3a\x00"]), timeout=calls.PATIENCE_S))
            assert refused.value.code() is Code.UNIMPLEMENTED
