"""Files that cannot be read again, on the real server: the metrics say so, until they can."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import calls
import certificates

from attnserve_server.access.tokens import digest, format_hash, new_token

if TYPE_CHECKING:
    from conftest import Server


def test_files_that_cannot_be_reloaded_are_in_the_metrics(start_server: Callable[..., Server], tmp_path: Path) -> None:
    authority = certificates.Authority(tmp_path)
    files, client_ca = authority.issue_for_server(), tmp_path / "client-ca.pem"
    client_ca.write_bytes(authority.ca.read_bytes())
    token, callers = new_token(), tmp_path / "callers.toml"
    callers.write_text(f'[[tokens]]\nname = "it"\nroles = ["metrics"]\nhash = "{format_hash(digest(token))}"\n')
    flags = [
        "--tls-certificate",
        str(files.certificate),
        "--tls-key",
        str(files.key),
        "--tls-client-ca",
        str(client_ca),
    ]
    server = start_server(*flags, "--tls-client-ca", str(client_ca), "--callers", str(callers))
    scrape = urllib.request.Request(
        f"http://{server.http_address}/metrics", headers={"Authorization": f"Bearer {token}"}
    )

    def failed() -> dict[str, float]:
        with urllib.request.urlopen(scrape, timeout=calls.PATIENCE_S) as answer:
            page = answer.read().decode()
        return {file: calls.value(page, "attnserve_reload_failed", file=file) for file in ("callers", "tls")}

    assert failed() == {"callers": 0, "tls": 0}
    for file, path in (("callers", callers), ("tls", files.certificate), ("tls", files.key), ("tls", client_ca)):
        valid = path.read_bytes()
        path.write_bytes(b"nothing of use")
        calls.until(lambda file=file: failed() == {"callers": 0, "tls": 0, file: 1}, f"{path} is broken", failed)
        path.write_bytes(valid)
        calls.until(lambda: failed() == {"callers": 0, "tls": 0}, f"{path} is mended", failed)


def test_without_such_files_there_is_no_such_metric(server: Server) -> None:
    assert "attnserve_reload_failed{" not in calls.get(server.http_address, "/metrics")[1]
