"""Numbers as callers pass them: which types are taken for one."""

from __future__ import annotations

from typing import Any


def real(value: Any) -> float:
    """A number of any type, as a float. TypeError for text, which `float` itself would read (a setting that nobody has
    converted is a mistake of its caller, who is better told early); TypeError or ValueError for anything else.
    """
    if type(value) is float:  # nearly always
        return value
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return float(value)
