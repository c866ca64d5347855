"""Numbers as callers pass them: which types are taken for one."""

from __future__ import annotations

import operator
from typing import Any, Final

import numpy as np

_NO_NUMBERS: Final = (str, bytes, bytearray, bool, np.bool_)
"""Types that `float` would read, but that are a mistake of the caller, who is better told early: text that nobody has
converted, or a flag in the place of a number, which Python takes for 0 or 1.
"""


MOST_SHOWN: Final = 100
"""How many characters of what was found an error shows."""


def real(value: Any) -> float:
    """A number of any type, as a float. TypeError for text and for True and False; TypeError or ValueError for anything
    else.
    """
    if type(value) is float:  # nearly always
        return value
    return float(_number(value))


def whole(value: Any) -> int:
    """An integer of any type. TypeError for anything else, True and False included."""
    if type(value) is int:
        return value
    return operator.index(_number(value))


def shown(value: Any) -> str:
    """What was found in the place of something else, in words that are not too long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python turns into text
        text = f"an {type(value).__name__} of too many digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _number(value: Any) -> Any:
    if isinstance(value, _NO_NUMBERS):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return value
