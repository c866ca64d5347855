"""The table of all settings of the server, in the documents.

In: the fields of `Config`. Out: docs/configuration.md and the README, with the table between their markers; in the
README in brief: without the variables, which are named as the flags are, and the values that settings take; and of what
each does only what it is, and what its default means.

    python -m scripts.settings_table    writes them
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from attnserve_server.settings.command_line import flag, variable
from attnserve_server.settings.config import kind_of, settings, shown_default
from benchmarks.document import with_text

ROOT: Final = Path(__file__).resolve().parent.parent
DOCUMENTS: Final = {ROOT / "docs" / "configuration.md": True, ROOT / "README.md": False}
"""Where the table is, and whether all of it."""
_MARKERS: Final = ("<!-- configuration -->", "<!-- /configuration -->")


def markdown(*, full: bool = True) -> str:
    """The table of all settings, in markdown: with the names of their environment variables, the values that they take,
    as errors say them, and all that is said of them; or in brief.
    """
    heads = ["flag", *["environment variable"] * full, "default", *["values"] * full, "what it does"]
    rows = [heads, ["---"] * len(heads)]
    for item in settings():
        kind = kind_of(item)
        names = [flag(item.name), *[variable(item.name)] * full]
        cells = [f"`{each}`" for each in (*names, shown_default(item))]
        help_text = item.metadata["help"]
        rows.append([*cells, *[kind.expected] * full, help_text if full else _brief(help_text)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _brief(help_text: str) -> str:
    """Of what is said of a setting, what it is and what its default means."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z0-9])", help_text)
    return " ".join([first, *(each for each in others if re.match("0: |0 is|Default: ", each))])


def with_table(document: str, *, full: bool = True) -> str:
    """A document with the table of all settings between its markers. ValueError if it lacks the markers."""
    return with_text(document, markdown(full=full), *_MARKERS)


if __name__ == "__main__":
    for path, full in DOCUMENTS.items():
        path.write_text(with_table(path.read_text("utf-8"), full=full), "utf-8")
