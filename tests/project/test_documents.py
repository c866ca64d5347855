"""The documents: their links lead to files in the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_into_the_repository(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", document.read_text("utf-8"))
    files = [(document.parent / link).resolve() for link in links if "://" not in link]
    assert [file for file in files if not (file.is_relative_to(ROOT) and file.exists())] == []
