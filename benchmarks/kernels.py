"""`python -m benchmarks.kernels`: the native kernel beside the kernels on torch tensors, on one core.

In: nothing; `--document docs/performance.md` writes the table there as well, between its markers. Out: a table in
markdown; for causal attentions of some lengths and for steps of decoders, the CPU time of one call by the native
kernel with each set of instructions, and by torch's flash kernel. All are called as layers call them, on tensors. They
take turns; a time is the median of the turns, ± half of the range that the middle half of them lies in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from time import thread_time
from typing import Final, NamedTuple, TypeAlias

import torch

from attnserve_server.kernels import AttentionCall, flash_cpu
from attnserve_server.native.calls import attend_all
from attnserve_server.native.library import Library, available
from benchmarks.document import with_text
from benchmarks.machine import cpu_model, load_average

LENGTHS: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096)
"""Lengths of causal attentions with 8 heads of 64."""
STEPS: Final = ((512, 1), (2048, 1), (8192, 1), (512, 4), (2048, 4), (8192, 4))
"""For one query: the number of keys, and the query heads for each of 8 key heads of 64."""
ROUNDS: Final = 11
AT_LEAST_S: Final = 0.005
"""A round repeats a call for at least this long."""
BEGIN, END = "<!-- kernels -->", "<!-- /kernels -->"

Way: TypeAlias = Callable[[AttentionCall], object]


class Time(NamedTuple):
    """The CPU time of one call, in seconds."""

    median: float
    spread: float

    @staticmethod
    def of(times: Sequence[float]) -> Time:
        """The time of a call, from several measurements."""
        first, middle, third = quantiles(times, n=4)
        return Time(middle, (third - first) / 2)

    def __str__(self) -> str:
        """As microseconds."""
        return f"{self.median * 1e6:,.0f} ± {self.spread / self.median:.0%}"


def ways() -> dict[str, Way]:
    """The kernels available on this machine, the native one first."""
    found: dict[str, Way] = {}
    for instructions in available():
        library = Library(instructions)
        found[f"native, {instructions}"] = lambda call, library=library: attend_all(library, [call], None)  # type: ignore[misc]
    found["torch, flash"] = flash_cpu.attend
    return found


def measured(call: AttentionCall, ways: dict[str, Way]) -> dict[str, Time]:
    """The time that each kernel takes for a call."""
    repeats, times = {}, {name: list[float]() for name in ways}
    for name, way in ways.items():
        way(call)  # also does what is done only once
        repeats[name] = max(1, round(AT_LEAST_S / max(_timed(way, call, 1), 1e-6)))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(_timed(way, call, repeats[name]))
    return {name: Time.of(each) for name, each in times.items()}


def _timed(way: Way, call: AttentionCall, repeats: int) -> float:
    begin = thread_time()
    for _ in range(repeats):
        way(call)
    return (thread_time() - begin) / repeats


def calls() -> list[tuple[str, AttentionCall]]:
    """The calls that are measured, with their descriptions."""
    found = []
    for length in LENGTHS:
        query, key, value = torch.randn(3, 1, 8, length, 64)
        found.append((f"{length:,} tokens, causal", AttentionCall(query, key, value, 0.125, window=(-1, 0))))
    for keys, group in STEPS:
        query, (key, value) = torch.randn(1, 8 * group, 1, 64), torch.randn(2, 1, 8, keys, 64)
        heads = f", {8 * group} heads on 8" * (group > 1)
        found.append((f"1 query, {keys:,} keys{heads}", AttentionCall(query, key, value, 0.125)))
    return found


@torch.inference_mode()
def table() -> str:
    """Measures everything; a table in markdown."""
    found = ways()
    first = next(iter(found))
    lines = [["", *(f"{name}: µs" for name in found), "torch / native"]]
    for name, call in calls():
        times = measured(call, found)
        ratio = times["torch, flash"].median / times[first].median
        lines.append([name, *(str(times[way]) for way in found), f"{ratio:.2f}"])
    lines.insert(1, ["---", *("---:" for _ in lines[0][1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, and writes it into a document if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--document", type=Path, help="where the table goes as well, such as docs/performance.md")
    document = parser.parse_args(arguments).document
    torch.set_num_threads(1)
    load = load_average()[0]
    text = f"{cpu_model()}, one core; torch {torch.__version__}; load average {load:.2f} before.\n\n{table()}"
    print(text)
    if document is not None:
        document.write_text(with_text(document.read_text("utf-8"), text, BEGIN, END), "utf-8")


if __name__ == "__main__":
    main()
