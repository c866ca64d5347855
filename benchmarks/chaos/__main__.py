"""`make chaos`: every promise of docs/reliability.md, and an experiment that tries to break it.

Each experiment starts its own servers on free ports of this machine. The figures go to the terminal and to a JSON file,
where those of other experiments stay, and from there into the document. Exit status 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks import machine
from benchmarks.chaos.experiments import NAMES, experiment
from benchmarks.chaos.outcome import Outcome, Result, exactly
from benchmarks.chaos.report import BEGIN, DOCUMENT, END, report, table, with_kept
from benchmarks.document import with_text

DEFAULT_JSON: Final = Path("bench-results/chaos.json")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--experiments", default=",".join(NAMES), help="which, by name")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long what goes on for a time does so")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="where all figures go")
    parser.add_argument("--document", type=Path, help=f"a document to write them into as well, such as {DOCUMENT}")
    found = parser.parse_args(arguments)
    found.experiments = found.experiments.split(",")
    if unknown := [name for name in found.experiments if name not in NAMES]:
        parser.error(f"no such experiments: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if found.minutes <= 0:
        parser.error("--minutes must be above 0")
    return found


def make(name: str, minutes: float) -> Outcome:
    """Runs one experiment. If that ends with an error (a caller that hangs, a server that does not start), its promise
    counts as broken, and the others are run all the same.
    """
    chosen = experiment(name)
    begun, begin, before = datetime.now(UTC), perf_counter(), machine.load_average()[0]
    try:
        figures = chosen.run(minutes)
    except Exception as error:
        traceback.print_exc()
        figures = [exactly(f"the experiment ended with {type(error).__name__}", 1, 0)]
    return Outcome(
        experiment=name,
        promise=chosen.PROMISE,
        machine=machine.describe(),
        begun=begun.isoformat(timespec="seconds"),
        minutes=minutes,
        seconds=round(perf_counter() - begin, 1),
        load=(before, machine.load_average()[0]),
        figures=figures,
    )


def together(earlier: Result | None, made: dict[str, Outcome]) -> Result:
    """The outcomes of this run, and the earlier ones of experiments that were not run now."""
    known = {} if earlier is None else {each.experiment: each for each in earlier.outcomes}
    known |= made
    return Result([known[name] for name in NAMES if name in known])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiments that the command line asks for, and returns the exit status."""
    chosen = options(sys.argv[1:] if arguments is None else arguments)
    earlier = Result.read(chosen.json) if chosen.json.exists() else None
    made: dict[str, Outcome] = {}
    for name in chosen.experiments:
        made[name] = outcome = make(name, chosen.minutes)
        print(f"{name}: {'kept' if outcome.kept else 'BROKEN'}, {outcome.seconds:g} s\n{outcome.promise}")
        print(f"\n{table(outcome)}\n", flush=True)
        result = together(earlier, made)
        result.write(chosen.json)
        if chosen.document is not None:
            document = chosen.document.read_text("utf-8")
            chosen.document.write_text(with_text(document, with_kept(document, report(result)), BEGIN, END), "utf-8")
    return 0 if all(outcome.kept for outcome in made.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
