"""The kinds of values that settings have.

In: bounds, words, patterns. Out: a `Kind`, which checks whether something is such a value, parses one from the text of
a flag or an environment variable, and formats it as text that parses to the same value.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from attnserve_server.settings import units

MOST: Final = 10**18
"""The largest number, unless a setting has a bound of its own: limits travel to callers in 64 bits (`ServerInfo`)."""
MOST_BYTES: Final = 2**60


class Kind(NamedTuple):
    """The values of a setting: a description in words, a check, a parser and a formatter.

    Private ones are not shown to callers: paths and addresses of the server's own surroundings.
    """

    expected: str
    valid: Callable[[Any], bool]
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    private: bool = False


def _whole(words: str, parse: Callable[[str], int], show: Callable[[int], str], least: int, most: int) -> Kind:
    bound = units.format_count(most) if show is str else show(most)
    return Kind(
        f"{words} of at least {show(least)} and at most {bound}",
        lambda value: type(value) is int and least <= value <= most,
        parse,
        show,
    )


def size(least: int = 1, most: int = MOST_BYTES, multiple: int = 1, *, or_zero: bool = False) -> Kind:
    """Bytes; they may have to be a multiple of a number. `or_zero` allows 0, too."""
    kind = _whole("a size (such as 64MiB or 65536)", units.parse_size, units.format_size, least, most)
    some = "" if multiple == 1 else f", a multiple of {multiple}"
    return kind._replace(
        expected=f"{kind.expected}{some}{', or 0' if or_zero else ''}",
        valid=lambda value: (kind.valid(value) and value % multiple == 0) or (or_zero and value == 0),
    )


def count(least: int = 1, most: int = MOST) -> Kind:
    """A count."""
    return _whole("a number", units.parse_count, str, least, most)


def flops(least: int = 1) -> Kind:
    """A number of floating-point operations."""
    return _whole("a number of operations (such as 2e9)", units.parse_count, units.format_count, least, MOST)


def duration(most: float | None = None) -> Kind:
    """Seconds."""
    bound = sys.float_info.max if most is None else most
    return Kind(
        "a duration (such as 200ms or 2s)" + (f" of at most {units.format_duration(most)}" if most is not None else ""),
        lambda value: type(value) in (int, float) and 0 <= value <= bound,
        units.parse_duration,
        units.format_duration,
    )


def words(*choices: str) -> Kind:
    """One of the given words."""
    return Kind(" or ".join(choices), lambda value: value in choices, str, str)


def matches(expected: str, valid: Callable[[str], object], *, private: bool = False) -> Kind:
    """Text for which `valid` does not return None or raise ValueError."""

    def check(value: object) -> bool:
        try:
            return isinstance(value, str) and valid(value) is not None
        except ValueError:
            return False

    return Kind(expected, check, str, str, private)


def _endpoint(text: str) -> tuple[str, int] | None:
    """The host and port of an endpoint; None if it lacks one, or has other parts. Raises ValueError if the port is no
    number of a port.
    """
    if not re.fullmatch(r"https?://[^\s/@]+", text):
        return None
    parts = urlsplit(text)
    return (parts.hostname, parts.port) if parts.hostname and parts.port else None


DURATION: Final = duration()
TRUTH: Final = Kind(
    "true or false", lambda value: isinstance(value, bool), units.parse_truth, lambda value: str(value).lower()
)
TCP: Final = matches("host:port (port 0 is a free one)", units.parse_address, private=True)
TCP_OR_UNIX: Final = matches(
    "host:port (port 0 is a free one) or unix:/path",
    lambda text: re.fullmatch(r"unix:(//)?/[^\0]+", text) or units.parse_address(text),
    private=True,
)
ADVERTISED: Final = matches(
    "nothing, or host:port where others reach this server, with nothing in it that is still to be filled in",
    lambda text: not text or units.parse_address(text).can_be_reached or None,
)
TEXT: Final = Kind("text", lambda value: isinstance(value, str), str, str, private=True)
RATIO: Final = Kind(
    "a number from 0 to 1",
    lambda value: type(value) in (int, float) and 0 <= value <= 1,
    float,
    str,
)
ENDPOINT: Final = matches(
    "nothing, or http://host:port or https://host:port", lambda text: not text or _endpoint(text), private=True
)
DEVICE: Final = matches("auto, cpu, cuda or cuda:N", re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?").fullmatch)
