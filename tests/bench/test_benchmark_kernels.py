"""The benchmark of kernels: every way is measured, and the table goes into its place in the document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnserve_server.native.library import available
from benchmarks import kernels


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "LENGTHS", (8,))
    monkeypatch.setattr(kernels, "STEPS", ((20, 2),))
    monkeypatch.setattr(kernels, "ROUNDS", 2)
    monkeypatch.setattr(kernels, "AT_LEAST_S", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("few")
def test_every_way_is_in_the_table_and_that_in_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{kernels.BEGIN}\nold\n{kernels.END}\nafter\n")
    kernels.main(["--document", str(document)])
    heading, _, *lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert all(f"native, {instructions}: µs" in heading for instructions in available())
    assert "torch, flash: µs" in heading
    assert [line.split(" | ")[0] for line in lines] == ["| 8 tokens, causal", "| 1 query, 20 keys, 16 heads on 8"]
    measured = 1 + len(available())
    assert all(line.count("±") == measured for line in lines)
    written = document.read_text()
    assert written.startswith(f"before\n{kernels.BEGIN}\n")
    assert written.endswith(f"{lines[-1]}\n{kernels.END}\nafter\n")
    assert "old" not in written


def test_spreads_are_those_of_the_middle_half() -> None:
    time = kernels.Time.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0])
    assert time == (4.0, 2.0)
    assert str(kernels.Time(0.0012344, 0.00012344)) == "1,234 ± 10%"
