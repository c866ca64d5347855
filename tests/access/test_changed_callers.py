"""Streams that are open while the callers file changes, on the real server."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import calls
import grpc
import messages
from google.rpc import error_details_pb2

from attnserve_server.access.tokens import digest, format_hash, new_token

if TYPE_CHECKING:
    from conftest import Server


def test_a_stream_whose_token_becomes_another_callers_ends(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Otherwise whoever has the token now could go on using the caches of its former owner. A stream whose caller stays
    the same goes on, whatever else has changed in the file.
    """
    given, kept, file = new_token(), new_token(), tmp_path / "callers.toml"

    def is_of(owner: str) -> None:
        entries = ((owner, given, '"use"'), ("cat", kept, '"use", "metrics"'))
        file.write_text(
            "".join(
                f'[[tokens]]\nname = "{name}"\nroles = [{roles}]\nhash = "{format_hash(digest(token))}"\n'
                for name, token, roles in entries
            )
        )

    is_of("ann")
    server = start_server("--callers", str(file))
    request = messages.random_attend(0)
    with grpc.insecure_channel(server.address) as channel:
        passed_on, stays = (calls.Stream(channel, (("authorization", f"Bearer {each}"),)) for each in (given, kept))
        for stream in (passed_on, stays):
            stream.send(calls.call(1, request))
            calls.assert_answers(stream.replies(1)[0].attend, request)
        is_of("bob")

        def is_reloaded() -> bool:
            stays.send(calls.call(2, request))
            calls.assert_answers(stays.replies(1)[0].attend, request)
            return "the callers file was reloaded" in server.stderr()

        calls.until(is_reloaded, "the file is read again")
        passed_on.send(calls.call(2, request))
        code, status = passed_on.error()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert calls.detail(status, error_details_pb2.ErrorInfo).reason == "CALLER_CHANGED"
        stays.send(calls.call(3, request))
        stays.half_close()
        assert [reply.error.code for reply in stays.rest()] == [0]
    scrape = urllib.request.Request(
        f"http://{server.http_address}/metrics", headers={"Authorization": f"Bearer {kept}"}
    )
    with urllib.request.urlopen(scrape, timeout=calls.PATIENCE_S) as answer:
        page = answer.read().decode()
    labels = {"operation": "attend_stream", "code": "UNAVAILABLE"}
    assert calls.value(page, "attnserve_requests_total", **labels) == 0, "it fails no call"
