"""Documents that are written by hand but for what stands between two markers, which is written anew."""

from __future__ import annotations


def with_text(document: str, text: str, begin: str, end: str) -> str:
    """A document with a text between its markers. ValueError if it lacks them."""
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"no {begin} followed by {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"
