"""What documents show of the SDK works as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from conftest import Models, Server

from attnserve import Client

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "127.0.0.1:8001"
"""Where documents say that a server is."""


def snippets(document: str, server: Server) -> Iterator[CodeType]:
    """The Python in a document, each piece compiled under the lines that it has there, for a server of the test's."""
    text = (ROOT / document).read_text("utf-8").replace(ADDRESS, server.address)
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield compile("\n" * text.count("\n", 0, found.start(1)) + found[1], document, "exec")


def test_all_of_caches(start_server: Callable[..., Server], models: Models) -> None:
    server = start_server("--device", "cpu", "--layers", str(models.directory / "layers.toml"))
    namespace: dict[str, Any] = {}
    for code in snippets("docs/caches.md", server):
        exec(code, namespace)
    with namespace["client"] as client:
        assert client.caches.list() == ()


def test_what_the_readme_shows_first(server: Server) -> None:
    """Attention, and caches; the rest needs models that are not here."""
    namespace: dict[str, Any] = {}
    first, *others = snippets("README.md", server)
    exec(first, namespace)
    with Client(server.address) as namespace["client"]:
        (caches,) = (code for code in others if "create_cache" in code.co_names)
        exec(caches, namespace)
