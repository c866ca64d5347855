"""The README's figures of speed are those of docs/performance.md, from the same run."""

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import kernels, report, speeds

ROOT = Path(__file__).resolve().parents[2]


@cache
def performance() -> str:
    return (ROOT / "docs" / "performance.md").read_text("utf-8")


@cache
def figures() -> str:
    """The generated part of docs/performance.md."""
    return between(performance(), report.BEGIN, report.END)


@cache
def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def between(text: str, begin: str, end: str) -> str:
    return text.partition(begin)[2].partition(end)[0]


def row(workload: str, way: str) -> list[str]:
    """One way's cells in a workload's own table, without ratios: requests per second, tokens, spread, p50 and so on."""
    lines = between(figures(), f"\n{workload}: ", "```").splitlines()
    line = next(line for line in lines if line.startswith(f"{way}  "))
    rest = line.removeprefix(way).replace(" ~ ", " ").replace(" M ", "M ").split()  # millions of tokens per second
    return rest[next(n for n, cell in enumerate(rest) if cell.endswith("%")) - 2 :]


def summary() -> dict[str, list[str]]:
    """The cells of the summary, by workload."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in figures().splitlines() if line[:2] == "| "]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.mark.parametrize("workload", speeds.ROWS)
def test_table_has_the_rates_of_the_run(workload: str) -> None:
    peer = summary()[workload][2].removesuffix("/s")
    rates = [row(workload, way)[0] if way else peer for way in speeds.COLUMNS.values()]
    cells = [speeds.ROWS[workload], *(speeds.to_three_digits(int(rate.replace(",", ""))) for rate in rates)]
    assert f"| {' | '.join(cells)} |" in between(readme(), speeds.BEGIN, speeds.END).splitlines()


def test_sentence_has_the_factors_of_the_run() -> None:
    sentence = " ".join(between(readme(), speeds.BEGIN, speeds.END).split())
    for workload, words in speeds.FACTORS.items():
        assert words.format(summary()[workload][4]).lower() in sentence.lower()


def test_one_call_takes_what_the_run_found() -> None:
    """Those of a single request over 16 tokens, by the median."""
    ways = [f"attnserve, {name}" for name in ("stream", "unary", "async SDK", "sync SDK")]
    found = sorted(int(row("S1", way)[3]) for way in ways)
    said = f"{row('S1', 'torch in process')[3]} µs there, and {found[0]} to {found[-1]} µs here."
    assert said in " ".join(readme().split())


def test_the_native_kernel_is_as_fast_as_its_table_says() -> None:
    """With AVX-512; with AVX2 only, as is said of the machine that has no more."""
    table = between(performance(), kernels.BEGIN, kernels.END).splitlines()
    head, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("| ")]
    assert (head[1], head[-1]) == ("native, AVX-512: µs", "torch / native")
    ratios = [float(line[-1]) for line in lines if not line[-1].startswith("---")]
    assert len(ratios) == len(kernels.LENGTHS) + len(kernels.STEPS)
    said = " ".join(readme().split())
    assert f"with AVX-512 it computes attention {min(ratios):.1f} to {max(ratios):.1f} times as fast as torch's" in said
    elsewhere = " ".join((ROOT / "docs" / "performance-elsewhere.md").read_text("utf-8").split())
    found = re.search(r"([\d.]+) \(16 tokens\) to ([\d.]+) times \(1 query, 8 192 keys\) as fast as torch's", elsewhere)
    assert found is not None
    assert f"only AVX2 {found[1]} to {found[2]} times" in said


@pytest.mark.parametrize(
    ("value", "written"),
    [(79.6, "80"), (852.4, "852"), (999.7, "1 000"), (1234.6, "1 240"), (15_681, "15 700"), (1_250_000, "1 250 000")],
)
def test_rates_are_rounded_from_those_of_the_other_document(value: float, written: str) -> None:
    assert re.fullmatch(r"[\d ]+", written)
    assert speeds.to_three_digits(value) == written


def test_what_keeps_the_machine_busy_is_what_the_run_found() -> None:
    """Requests per second times the CPU time of server and client, over both cores."""
    shares = []
    for way in ("attnserve, stream", "Mosec, http"):
        rate, _, _, _, _, server, client, *_ = row("X", way)
        shares.append(int(rate.replace(",", "")) * (int(server.replace(",", "")) + int(client)) * 1e-6 / 2)
    said = "in the closed loop of X the service and its client use {:.0%} of two cores, Mosec and its client {:.0%}."
    assert said.format(*shares).replace("%", " %") in " ".join(performance().split())
