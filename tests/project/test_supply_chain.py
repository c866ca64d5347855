"""The bill of materials, and the audit of pinned versions: against the test's own vulnerability database."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PINNED = {
    canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#") and ((pin := Requirement(line)).marker is None or pin.marker.evaluate())
}
"""The package versions pinned for this Python."""
VULNERABILITY = {
    "id": "OSV-1",
    "summary": "",
    "details": "",
    "aliases": [],
    "modified": "2026-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "numpy"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
        }
    ],
}


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("sbom") / "new" / "sbom.json"
    command = [sys.executable, "scripts/sbom.py", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_the_bill_names_what_serves_as_it_is_pinned_and_no_tools(bill: dict[str, Any]) -> None:
    versions = {canonicalize_name(each["name"]): each["version"] for each in bill["components"]}
    assert {"grpcio", "numpy", "protobuf", "torch", "safetensors", "prometheus-client"} <= versions.keys()
    assert not {"pytest", "mypy", "ruff", "transformers", "cyclonedx-bom", "cryptography"} & versions.keys()
    assert all(PINNED[name] == version.partition("+")[0] for name, version in versions.items())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "attnserve")
    assert bill["metadata"]["component"]["version"]


def test_the_bill_says_what_needs_what(bill: dict[str, Any]) -> None:
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    listed = {each["bom-ref"] for each in bill["components"]}
    assert needs.keys() == listed | {bill["metadata"]["component"]["bom-ref"]}
    assert listed == {need for each in needs.values() for need in each}
    assert any(
        need.startswith("sympy==") for need in needs[next(each for each in listed if each.startswith("torch=="))]
    )


class Database(BaseHTTPRequestHandler):
    """Answers queries as OSV does; what it knows is `vulnerable`."""

    vulnerable: str | None = None
    asked: set[str]

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = canonicalize_name(query["package"]["name"])
        assert PINNED[name] == query["version"]
        self.asked.add(name)
        answer = json.dumps({"vulns": [VULNERABILITY]} if name == self.vulnerable else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def database() -> Iterator[tuple[str, type[Database]]]:
    """The address of a database, and what it knows."""
    handler = type("Knows", (Database,), {"asked": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query", handler
        server.shutdown()
        thread.join()


def audit(url: str, cache: Path) -> tuple[int, str]:
    """The exit status of an audit, and its output."""
    command = [sys.executable, "scripts/audit.py", "--osv-url", url, "--cache-dir", str(cache)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    return run.returncode, run.stdout + run.stderr


def test_all_that_is_pinned_is_looked_up(database: tuple[str, type[Database]], tmp_path: Path) -> None:
    url, knows = database
    status, said = audit(url, tmp_path)
    assert (status, f"{len(PINNED)} packages were looked up, 0 vulnerabilities" in said) == (0, True), said
    assert knows.asked == PINNED.keys()


def test_what_is_known_to_be_vulnerable_is_named(database: tuple[str, type[Database]], tmp_path: Path) -> None:
    url, knows = database
    knows.vulnerable = "numpy"
    status, said = audit(url, tmp_path)
    assert (status, f"numpy {PINNED['numpy']}: OSV-1, fixed in 99.0" in said) == (1, True), said


def test_a_database_that_is_not_there_is_no_good_news(tmp_path: Path) -> None:
    status, said = audit("http://127.0.0.1:9/v1/query", tmp_path)
    assert (status, "NOTHING WAS CHECKED" in said, "0 vulnerabilities" in said) == (2, True, False), said
