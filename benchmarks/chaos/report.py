"""What the experiments found, from their JSON file into docs/reliability.md."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

from benchmarks.chaos.outcome import Figure, Outcome, Result

DOCUMENT: Final = Path("docs/reliability.md")
WIDTH: Final = 120
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
HEADING: Final = "### "
SECTION: Final = f"\n\n{HEADING}"
"""What separates the section of an experiment from the one before."""


def report(result: Result) -> str:
    """All that is generated, in markdown."""
    return "\n\n".join(map(_section, result.outcomes))


def table(outcome: Outcome) -> str:
    """The figures of an experiment, as a table in markdown."""
    rows = [("figure", "found", "promised", ""), *map(_row, outcome.figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join((f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])))


def _row(figure: Figure) -> tuple[str, str, str, str]:
    verdict = "" if not figure.promised else "kept" if figure.kept else "**broken**"
    return figure.name, f"{_number(figure.value)} {figure.unit}".rstrip(), figure.bound, verdict


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def _section(outcome: Outcome) -> str:
    load = "" if outcome.load is None else " Load average {:.1f} before and {:.1f} after.".format(*outcome.load)
    machine = outcome.machine
    made = (
        f"On {machine['cpu']}, {machine['cores']} cores (python {machine['python']}, torch {machine['torch']}, grpcio "
        f"{machine['grpcio']}), at {outcome.begun}, with `--minutes {outcome.minutes:g}`, in {outcome.seconds:,.0f} s."
        f"{load}"
    )
    texts = (textwrap.fill(text, WIDTH) for text in (outcome.promise, made))
    return "\n\n".join((f"{HEADING}{outcome.experiment}", *texts, table(outcome)))


def with_kept(document: str, text: str) -> str:
    """The text, with those sections of the document that the text lacks, in the document's order. They are of
    experiments that were run elsewhere, so that their JSON file is not here.
    """
    sections = _sections(document.partition(BEGIN)[2].partition(END)[0]) | _sections(text)
    return "\n\n".join(HEADING + each for each in sections.values())


def _sections(text: str) -> dict[str, str]:
    """What follows each heading, by its first line."""
    found = f"\n\n{text.strip()}".split(SECTION)[1:]
    return {each.partition("\n")[0]: each for each in found}
