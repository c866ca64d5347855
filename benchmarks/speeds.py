"""What the README says of speed: a table of rates and a sentence of factors, in markdown, from a result.

Figures are the rounded ones of docs/performance.md, to three digits: both documents come from the same run.
"""

from __future__ import annotations

import textwrap
from typing import Final

from benchmarks.measure import IN_PROCESS, SERVICE
from benchmarks.results import Result, WorkloadResult

BEGIN, END = "<!-- speeds -->", "<!-- /speeds -->"
"""The markers in the README."""

ROWS: Final = {
    "S": "16 tokens, 16 in flight",
    "S1": "16 tokens, 1 in flight",
    "M": "128 tokens, 8 in flight",
    "L": "1 024 tokens, 4 in flight",
}
"""Workloads by name, in words."""

COLUMNS: Final = {
    "torch in process": IN_PROCESS,
    "peer": "",
    "attnserve, messages": SERVICE,
    "asyncio SDK": "attnserve, async SDK",
    "sync SDK": "attnserve, sync SDK",
}
"""Ways of calling, by heading; the peer is the best of each workload."""

FACTORS: Final = {
    "A": "a resident layer 512 wide reaches {} times the better peer's rate over 16 tokens",
    "D": "a decoder step over 2 048 resident tokens {} times the rate of sending them to the peer",
}
"""What is said of the service's rate over the better peer's, by workload."""

WIDTH: Final = 120


def speeds(result: Result) -> str:
    """The table, and the factors where there are peers. What was not measured is left out."""
    found = {each.name: each for each in result.workloads}
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    lines += [
        f"| {words} | {' | '.join(_rate(found[name], way) for way in COLUMNS.values())} |"
        for name, words in ROWS.items()
        if name in found
    ]
    factors = [
        words.format(f"{found[name].ratio(SERVICE, peer):.2f}")
        for name, words in FACTORS.items()
        if name in found and (peer := found[name].best_peer())
    ]
    return "\n".join([*lines, *_sentence(factors, dict(result.machine), result.cores)])


def to_three_digits(value: float) -> str:
    """A rounded rate, to three digits, with spaces between thousands."""
    whole = round(value)
    return f"{round(whole, min(3 - len(str(whole)), 0)):,}".replace(",", " ")


def _rate(result: WorkloadResult, way: str) -> str:
    """Requests per second; empty for a way that was not measured."""
    way = way or result.best_peer() or ""
    value = result.median(way, "requests_per_second") if way in result.ways else None
    return "" if value is None else to_three_digits(value)


def _sentence(factors: list[str], machine: dict[str, str | int], cores: int) -> list[str]:
    where = f"{machine['cpu']}, {cores} cores"
    said = f"{', and '.join(factors)} ({where})." if factors else f"Measured on {where}."
    return ["", textwrap.fill(said[0].upper() + said[1:], WIDTH)]
