"""The documents: their links lead to files in the repository, and the flags and variables that they name exist."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from attnserve_server.settings.config import Config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PROGRAMS = {
    *("--build", "--build-arg", "--env-file", "--publish", "--wait"),  # docker
    *("--extra-index-url", "--index-url"),  # pip
    *("--descriptor_set_in", "--es_opt", "--es_out", "--go-grpc_out", "--go_out", "--plugin"),  # protoc
    *("--enable-feature", "--pid", "--previous"),  # prometheus, py-spy, kubectl
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_into_the_repository(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", document.read_text("utf-8"))
    files = [(document.parent / link).resolve() for link in links if "://" not in link]
    assert [file for file in files if not (file.is_relative_to(ROOT) and file.exists())] == []


@cache
def ours() -> str:
    """The sources of all our programs."""
    folders = ("client", "server", "benchmarks", "scripts", "examples")
    return "".join(path.read_text("utf-8") for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_and_variables_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    settings = {field.name for field in dataclasses.fields(Config)}
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - OTHER_PROGRAMS - {"--help"}
    unknown = {flag for flag in flags if flag[2:].replace("-", "_") not in settings and f'"{flag}"' not in ours()}
    variables = set(re.findall(r"\bATTNSERVE_[A-Z_]+", text))
    unknown |= {name for name in variables if name[10:].lower() not in settings and name not in ours()}
    assert unknown == set()


def test_errors_lists_the_bounds_that_programs_are_told() -> None:
    told = re.compile(r'(?:\b_?full\(|share_exceeded\(|told\(|bound=|_too_many\("[^"]+", )"(\w+)"')
    sources = (ROOT / "server" / "attnserve_server").rglob("*.py")
    bounds = {bound for path in sources for bound in told.findall(path.read_text("utf-8"))}
    assert {"requests", "caches", "cache_bytes", "waiting_calls", "caller_streams"} <= bounds
    row = re.search(r"^\| `bound` \|.*", (ROOT / "docs" / "errors.md").read_text("utf-8"), re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`(\w+)`", row[0])) - {"bound"} == bounds
