"""Quantities as people write them: `256MiB`, `200ms`, `2e9`, `yes`, `127.0.0.1:8001`.

In: text of a flag or an environment variable. Out: bytes, seconds, counts, truth values and addresses in base units,
and back to text. Formatted text parses to the same value. All parsers raise ValueError on invalid text.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Final, NamedTuple

_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_SIZES: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_DURATIONS: Final = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_TRUTHS: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class Address(NamedTuple):
    """A TCP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. `localhost` is the only name of which that is known."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    @property
    def can_be_reached(self) -> bool:
        """Whether it is possible to connect to it: nobody listens on port 0, and `0.0.0.0` is only for listening."""
        try:
            return self.port > 0 and not ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return self.port > 0


def _number_and_unit(text: str) -> tuple[str, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return match[1], match[2]


def _whole(number: str, factor: int = 1) -> int:
    """A number times a factor, exactly; text such as `2e9` and `1.5` is accepted if the product is whole."""
    if number.isdigit():
        return int(number) * factor
    value = float(number) * factor
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{number} times {factor} is not a whole number")
    return int(value)


def parse_size(text: str) -> int:
    """Bytes: `65536`, `64KiB`, `1.5GiB`, `2GB` (powers of ten without the i)."""
    number, unit = _number_and_unit(text)
    if unit.lower() not in _SIZES:
        raise ValueError(f"{unit!r} is not a unit of size")
    return _whole(number, _SIZES[unit.lower()])


def format_size(size: int) -> str:
    """Bytes in the largest binary unit that divides them."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZES[unit.lower()] == 0:
            return f"{size // _SIZES[unit.lower()]}{unit}"
    return str(size)


def parse_duration(text: str) -> float:
    """Seconds: `200ms`, `2s`, `1m`, `50us`, `1h`; a plain number is seconds."""
    number, unit = _number_and_unit(text)
    if unit not in _DURATIONS:
        raise ValueError(f"{unit!r} is not a unit of time")
    # Dividing by 1000 rounds once, multiplying by an inexact 0.001 twice: 200ms must be 0.2.
    scale = _DURATIONS[unit]
    seconds = float(number) / round(1 / scale) if scale < 1 else float(number) * scale
    if not math.isfinite(seconds):
        raise ValueError(f"{text} is not finite")
    return seconds


def format_duration(seconds: float) -> str:
    """Seconds in the largest unit in which they are a whole number, or else as they are."""
    for unit in ("h", "m", "s", "ms", "us"):
        count = round(seconds / _DURATIONS[unit])
        if count and parse_duration(f"{count}{unit}") == seconds:
            return f"{count}{unit}"
    return f"{seconds:g}s" if float(f"{seconds:g}") == seconds else f"{seconds!r}s"


def parse_count(text: str) -> int:
    """A count of things or operations: `64`, `2e9`."""
    number, unit = _number_and_unit(text)
    if unit:
        raise ValueError(f"{unit!r} is a unit, and a count has none")
    return _whole(number)


def format_count(count: int) -> str:
    """A count, in scientific notation where that is shorter and exact."""
    short = re.sub(r"\.?0*e\+0*", "e", f"{count:.15e}")
    return short if len(short) < len(str(count)) and parse_count(short) == count else str(count)


def parse_truth(text: str) -> bool:
    """`true`, `yes`, `on`, `1`, or `false`, `no`, `off`, `0`."""
    try:
        return _TRUTHS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None


def parse_address(text: str) -> Address:
    """A TCP address: `127.0.0.1:8001`, `[::1]:8001`, `localhost:0` (a free port)."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    elif ":" in host:
        raise ValueError(f"{text!r} needs brackets around its IPv6 address")
    elif not re.fullmatch(r"[\w-]+(\.[\w-]+)*\.?", host):
        raise ValueError(f"{text!r} is not host:port")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port")
    return Address(host, int(port))
