"""Short runs of the `make chaos` experiments: promises about failures are kept. No times are asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import POOL

from benchmarks.chaos import device, drain, kill, rolling
from benchmarks.chaos.__main__ import DEFAULT_JSON, main, make, options, together
from benchmarks.chaos.experiments import NAMES, OVERLOADS
from benchmarks.chaos.outcome import Figure, Outcome, Result, exactly
from benchmarks.chaos.report import BEGIN, DOCUMENT, END, report, table, with_kept
from benchmarks.document import with_text

ROOT = Path(__file__).parents[2]
MACHINE: dict[str, str | int] = {"cpu": "a CPU", "cores": 2, "python": "3", "torch": "2", "grpcio": "1"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a dozen servers are started, each with a small pool; and what delays a restart is the callers' load."""
    monkeypatch.setenv("ATTNSERVE_CACHE_BYTES", POOL[1])
    monkeypatch.setattr(rolling, "CALLERS", 1)


def kept(name: str, minutes: float = 0.05) -> Outcome:
    """The outcome of an experiment, whose promise must have been kept."""
    outcome = make(name, minutes)
    assert outcome.kept, f"\n{table(outcome)}"
    return outcome


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("device", "greedy", *OVERLOADS)])
def test_the_promise_is_kept(name: str) -> None:
    kept(name)


def test_devices_that_fail_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the ways to fail; the others are tested in process (`scheduling/test_engine_faults.py`)."""
    monkeypatch.setattr(device, "CASES", {case: device.CASES[case] for case in ("lost", device.ON_THE_LOOP)})
    kept("device")


def test_figures_know_whether_they_are_within_their_bounds() -> None:
    assert Figure("a", 5, at_least=5).kept
    assert not Figure("a", 4, at_least=5).kept
    assert not Figure("a", 6, at_most=5).kept
    assert not Figure("a", float("nan"), at_most=5).kept
    assert not exactly("a", 1, 0).kept
    assert Figure("a", 5).kept
    assert not Figure("a", 5).promised


def test_what_was_found_is_written_read_and_reported(tmp_path: Path) -> None:
    figures = [exactly("wrong answers", 0, 0), Figure("p99", 12.345, "ms", at_most=5), Figure("calls", 12345)]
    outcome = Outcome("drain", "It ends well.", MACHINE, "today", 0.5, 3.5, (1.25, 2.0), figures)
    elsewhere = MACHINE | {"cpu": "another CPU"}
    result = Result([outcome, replace(outcome, experiment="kill", load=None, machine=elsewhere)])
    result.write(tmp_path / "deep" / "chaos.json")
    read = Result.read(tmp_path / "deep" / "chaos.json")
    assert read == result
    assert not read.outcomes[0].kept
    text = report(read)
    for part in ("It ends well.", "today", "12.3 ms", "at most 5", "**broken**", "12,345", "kept"):
        assert part in text
    on_this, on_another = text.split("\n### kill\n")
    assert on_this.startswith("### drain\n")
    assert ("On a CPU, 2 cores" in on_this, "On another CPU, 2 cores" in on_another) == (True, True)
    document = with_text((ROOT / DOCUMENT).read_text("utf-8"), "nothing", BEGIN, END)
    assert with_text(with_text(document, text, BEGIN, END), "nothing", BEGIN, END) == document


def test_figures_of_other_experiments_stay_in_a_document() -> None:
    """Their JSON file may be on another machine. Repeated experiments replace their old figures."""
    document = f"by hand\n{BEGIN}\n### drain\n\nold\n\n### kill\n\nkept\n{END}\nby hand"
    text = with_kept(document, "### soak\n\nnew\n\n### drain\n\nnewer")
    assert text == "### drain\n\nnewer\n\n### kill\n\nkept\n\n### soak\n\nnew"
    again = with_text(document, text, BEGIN, END)
    assert with_text(again, with_kept(again, text), BEGIN, END) == again


def test_what_was_made_earlier_stays_unless_it_is_made_again() -> None:
    drain = Outcome("drain", "It ends well.", MACHINE, "today", 0.5, 3.5, None, [])
    kill = replace(drain, experiment="kill")
    again = replace(drain, begun="tomorrow")
    first = together(None, {"kill": kill, "drain": drain})
    assert first.outcomes == [drain, kill], "in the order of the experiments"
    assert together(first, {"drain": again}).outcomes == [again, kill]


def test_an_experiment_that_ends_with_an_error_has_broken_its_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def hangs(minutes: float) -> list[Figure]:
        raise TimeoutError("caller-0 hangs")

    monkeypatch.setattr(drain, "run", hangs)
    monkeypatch.setattr(kill, "run", lambda minutes: [exactly("calls that failed", 0, 0)])
    found = tmp_path / "chaos.json"
    assert main(["--experiments", "drain,kill", "--json", str(found)]) == 1
    said = capsys.readouterr()
    assert "drain: BROKEN" in said.out
    assert "kill: kept" in said.out
    assert "caller-0 hangs" in said.err
    assert [outcome.kept for outcome in Result.read(found).outcomes] == [False, True]
    assert "the experiment ended with TimeoutError | 1     | 0        | **broken** |" in report(Result.read(found))


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options([])
    assert chosen.experiments == [*NAMES]
    assert chosen.json == DEFAULT_JSON
    for wrong in (["--experiments", "peace"], ["--minutes", "0"]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert "peace" in capsys.readouterr().err
