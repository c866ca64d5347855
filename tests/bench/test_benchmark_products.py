"""The benchmark of products: every dtype and width is measured, and the table goes into its place in the document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import products


def test_every_width_is_in_the_table_and_that_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "ROUNDS", 1)
    monkeypatch.setattr(products, "WIDTHS", ((32, 48), (48, 32)))
    document = tmp_path / "layers.md"
    document.write_text(f"before\n{products.BEGIN}\nold\n{products.END}\nafter\n")
    threads = torch.get_num_threads()
    products.main(["--document", str(document)])
    torch.set_num_threads(threads)
    heading, _, *lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert heading == "|  | 1 row: µs | 16 rows: µs | 128 rows: µs | 512 rows: µs |"
    dtypes = ("float32", "float16", "bfloat16")
    widths = [f"| {dtype}, {width}" for dtype in dtypes for width in ("32 → 48", "48 → 32")]
    assert [line.split(" | ")[0] for line in lines] == widths
    for line in lines:
        for cell in line.strip(" |").split(" | ")[1:]:
            assert re.fullmatch(r"[\d,]+, [\d,]+, [\d,]+: \d+\.\d\d", cell)
    written = document.read_text()
    assert written.startswith(f"before\n{products.BEGIN}\n")
    assert written.endswith(f"{lines[-1]}\n{products.END}\nafter\n")
    assert "old" not in written
