"""Requests on caches that callers have given the same ids, on the real server: each knows its own again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import calls
import grpc
import pytest

from attnserve.v1 import caches_pb2, caches_pb2_grpc, tensor_pb2
from attnserve_server.access.tokens import digest, format_hash, new_token

if TYPE_CHECKING:
    from conftest import Server


def test_an_id_is_that_of_its_callers_request(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """What another made by a request with the same id is neither found nor given up."""
    tokens, file = {name: new_token() for name in ("ann", "bob")}, tmp_path / "callers.toml"
    file.write_text(
        "".join(
            f'[[tokens]]\nname = "{name}"\nroles = ["use"]\nhash = "{format_hash(digest(token))}"\n'
            for name, token in tokens.items()
        )
    )
    with grpc.insecure_channel(start_server("--callers", str(file)).address) as channel:
        stub = caches_pb2_grpc.CacheServiceStub(channel)

        def ask(method: Any, caller: str, request: Any) -> Any:
            metadata = (("authorization", f"Bearer {tokens[caller]}"),)
            return method(request, timeout=calls.PATIENCE_S, metadata=metadata)

        def names(caller: str) -> list[str]:
            return [cache.name for cache in ask(stub.List, caller, caches_pb2.CacheServiceListRequest()).caches]

        shape = {"num_kv_heads": 1, "head_dim": 8, "dtype": tensor_pb2.DATA_TYPE_FLOAT32}
        create = caches_pb2.CacheServiceCreateRequest(**shape, request_id=b"made")
        made = {caller: ask(stub.Create, caller, create).cache.name for caller in tokens}
        assert made["ann"] != made["bob"]
        assert {caller: ask(stub.Create, caller, create).cache.name for caller in tokens} == made
        give_up = caches_pb2.CacheServiceDeleteRequest(request_ids=[b"made"])
        ask(stub.Delete, "bob", give_up)
        assert (names("ann"), names("bob")) == ([made["ann"]], [])

        fork = caches_pb2.CacheServiceForkRequest(names=[made["ann"]], request_id=b"forked")
        (forked,) = ask(stub.Fork, "ann", fork).caches
        ask(stub.Delete, "ann", give_up)
        assert names("ann") == [forked.name]
        (again,) = ask(stub.Fork, "ann", fork).caches
        assert again.name == forked.name
        with pytest.raises(grpc.RpcError) as caught:
            ask(stub.Fork, "bob", fork)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
