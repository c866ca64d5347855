"""What `attnserve top` shows: a server's figures as a table for a terminal of 80 columns or more. Needs rich."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from attnserve._commands.top_figures import Figures, Rates

_BAR: Final = 12
_STEPS: Final = " ▁▂▃▄▅▆▇█"
_ROWS: Final = 6
"""How many operations are shown: those of which there were most requests."""
_NAMES: Final = 4
"""How many callers, layers or kernels are named; the others are only counted."""


def view(
    figures: Figures, address: str, now: float, history: Sequence[float] = (), *, gone_since: float | None = None
) -> RenderableType:
    """The whole view at `now`, in seconds since the epoch; `history` has the latest rates of requests per second. If
    the server does not answer, the figures are from when it did, and `gone_since` is when that was.

    What matters most comes first: a terminal that is too small cuts off the rest.
    """
    head = Table.grid(expand=True, padding=(0, 2, 0, 0))
    head.add_column()
    head.add_column(justify="right")
    what = f"attnserve {figures.version} on {figures.device.name}, torch {figures.torch}"
    if gone_since is None:
        state = Text(figures.state, style="bold green" if figures.state == "serving" else "bold red")
        state.append(f", up {_duration(now - figures.started_at)}", style="not bold default")
    else:
        state = Text(f"no answer for {_duration(now - gone_since)}", style="bold red")
    head.add_row(Text(address, style="bold"), Text.assemble(what, ", ", state))
    return Group(head, Rule(style="dim"), _operations(figures), Rule(style="dim"), _summary(figures, history))


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(max(0.0, seconds)))


def _summary(figures: Figures, history: Sequence[float]) -> Table:
    load, batches, device, caches = figures.load, figures.batches, figures.device, figures.caches
    bound, fullest = load.fullest
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, text in (
        (
            "throughput",
            f"{_rate(figures.requests)} requests/s  {_sparkline(history)}".rstrip(),
        ),
        (
            "",
            f"{_rate(figures.query_tokens)} tokens/s, {_scaled(figures.flops)}FLOP/s, "
            f"{_bytes(figures.received_bytes)}/s in, {_bytes(figures.sent_bytes)}/s out, {figures.streams:.0f} streams",
        ),
        (
            "queue",
            f"{load.queue_requests:,.0f} waiting ({_bytes(load.queue_bytes)}), "
            f"{load.in_flight.get('requests', 0.0):,.0f} in flight"
            + (f", work of {_seconds(load.in_flight['seconds'])}" if load.in_flight.get("seconds") else ""),
        ),
        ("", f"{_bar(fullest)} {_percent(fullest)} of the limit on {bound}" if bound else ""),
        (
            "batches",
            f"{_rate(batches.batches)}/s of {_number(batches.mean_requests)} requests "
            f"(p99: {_number(batches.p99_requests)}), {_percent(batches.padding)} padding",
        ),
        (
            "device",
            f"{_bar(device.use)} {_percent(device.use)} in use"
            + (f", the same batch for {_seconds(device.batch_seconds)}" if device.batch_seconds > 1 else ""),
        ),
        (
            "",
            f"event loop {_percent(device.loop)} in use, {device.processors:.1f} processors, "
            f"{_bytes(device.resident_bytes)} resident"
            + "".join(f", {_bytes(size)} {state}" for state, size in device.memory.items()),
        ),
        ("phases", ", ".join(f"{name} {_seconds(mean)}" for name, mean in figures.phases.items())),
        ("refused", _by_name(figures.rejected)),
        ("cancelled", _by_name(figures.cancelled)),
        ("callers", _by_part(figures.callers)),
        (
            "caches",
            f"{_bar(_part(caches.pool.get('used', 0.0), caches.pool_bytes))} "
            f"{_bytes(caches.pool.get('used', 0.0))} of {_bytes(caches.pool_bytes)}",
        ),
        (
            "",
            f"{caches.open:,.0f} open, {caches.tokens:,.0f} tokens, {_rate(caches.appended_tokens)} appended/s, "
            f"{_rate(caches.forks)} forks/s, {_rate(sum(caches.evictions.values()))} evicted/s",
        ),
        ("layers", _by_part(figures.layers)),
        ("kernels", _by_name(batches.kernel_calls)),
    ):
        if text:
            table.add_row(name, Text(text))
    return table


def _operations(figures: Figures) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("operation")
    for title in ("requests/s", "p50", "p99", "failed/s"):
        table.add_column(title, justify="right")
    for name, operation in list(figures.operations.items())[:_ROWS]:
        failed = Text(_rate(operation.failed), style="bold red" if operation.failed else "")
        table.add_row(Text(name), _rate(operation.requests), _seconds(operation.p50), _seconds(operation.p99), failed)
    if not figures.operations:
        table.add_row("no requests yet")
    if (more := len(figures.operations) - _ROWS) > 0:
        table.add_row(f"{more} more")
    return table


def _by_name(rates: Rates) -> str:
    """The largest, by name, with their rates per second."""
    return _listed([f"{name} {_rate(rate)}/s" for name, rate in rates.items()])


def _by_part(rates: Rates) -> str:
    """The largest, by name, with their shares of the total."""
    whole = sum(rates.values())
    return _listed([f"{name} {_percent(rate / whole)}" for name, rate in rates.items()])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _NAMES
    return ", ".join([*texts[:_NAMES], *([f"{more} more"] if more > 0 else [])])


def _part(value: float, whole: float) -> float:
    return value / whole if whole else math.nan


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _percent(part: float) -> str:
    return "-" if math.isnan(part) else f"{part:.0%}" if part >= 0.1 or part == 0 else f"{part:.1%}"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value * 1e6:.0f} µs" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _bytes(value: float) -> str:
    """Bytes with a unit, in powers of 1024."""
    return f"{value:.0f} B" if value < 1024 else _scaled(value / 1024, 1024, ("KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float, step: int = 1000, units: Sequence[str] = ("", "k", "M", "G", "T", "P")) -> str:
    """The number, a space, and an SI prefix; or one of other units, each of which is `step` times the one before."""
    for unit in units[:-1]:
        if value < step:
            return f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def _bar(part: float) -> str:
    """A bar, filled up to `part` of 1."""
    eighths = 0 if math.isnan(part) else round(min(max(part, 0.0), 1.0) * _BAR * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(_BAR, "·")


def _sparkline(history: Sequence[float]) -> str:
    """The latest values as bars, of which the largest has full height."""
    most = max(history, default=0.0)
    return "".join(_STEPS[round(value / most * (len(_STEPS) - 1))] if most else _STEPS[0] for value in history)
