"""The table of all settings of the server, in their document.

In: the fields of `Config`. Out: docs/configuration.md, with the table between its markers.

    python scripts/settings_table.py    writes it
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnserve_server.settings.command_line import flag, variable
from attnserve_server.settings.config import kind_of, settings

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
_MARKERS: Final = ("<!-- configuration -->", "<!-- /configuration -->")


def markdown() -> str:
    """The table of all settings, in markdown."""
    rows = ["| flag | environment variable | default | what it does |", "|---|---|---|---|"]
    for item in settings():
        default = kind_of(item).show(item.default)
        rows.append(f"| `{flag(item.name)}` | `{variable(item.name)}` | `{default}` | {item.metadata['help']} |")
    return "\n".join(rows)


def with_table(document: str) -> str:
    """A document with the table of all settings between its markers. ValueError if it lacks the markers."""
    begin, end = _MARKERS
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"no {begin} followed by {end}")
    return f"{before}{begin}\n{markdown()}\n{end}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text("utf-8")), "utf-8")
