"""Definitions of layers beside a checkpoint whose tensors have known shapes: text in, specifications or defects out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnserve_server.layers.definitions import examine, load_definitions
from attnserve_server.layers.errors import Defect
from attnserve_server.layers.specification import Architecture, LayerSpecification

SHAPES: dict[str, tuple[int, ...]] = {
    "q": (16, 12), "k": (8, 10), "v": (12, 10), "o": (7, 24), "bq": (16,), "bk": (8,), "bv": (12,), "bo": (7,),
    "square": (16, 16), "vector": (16,), "row": (1, 16), "wide": (16, 12), "context": (16, 10), "w": (12, 10),
    "fused": (12, 48), "fused_bias": (48,), "norm": (16,), "up": (40, 16), "down": (16, 40), "table": (30, 16),
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors |= {f"{n}.{name}": torch.randn(SHAPES[name]) for n in range(3) for name in ("square", "norm", "up", "down")}
    save_file(tensors | {"none": torch.zeros(0, 12)}, directory / "file.safetensors")
    save_file({"half": torch.zeros(4, 4).half(), "single": torch.zeros(4, 4)}, directory / "mixed.safetensors")
    return directory


def define(directory: Path, *tables: str) -> list[LayerSpecification]:
    path = directory / "layers.toml"
    path.write_text("".join(f"[[layers]]\n{table}\n" for table in tables))
    return load_definitions(path, directory, [])


def one(directory: Path, text: str) -> Architecture:
    (layer,) = define(directory, f'name = "one"\nfile = "file.safetensors"\n{text}')
    return layer.architecture


def wrong(directory: Path, *tables: str) -> list[Defect]:
    path = directory / "layers.toml"
    path.write_text("".join(f"[[layers]]\n{table}\n" for table in tables))
    return list(examine(path, directory).defects)


MULTI_HEAD = """
kind = "multi_head"
heads = 4
[layers.parameters]
query.weight = "q"
query.bias = "bq"
key.weight = "k"
key.bias = "bk"
value.weight = "v"
value.bias = "bv"
output.weight = "o"
output.bias = "bo"
"""


TRANSFORMER = """
kind = "transformer"
heads = 4
pre_norm = false
activation = "gelu"
norm = { kind = "layer", epsilon = 1e-5 }
[layers.parameters]
"blocks.{n}.self.query.weight" = "{n}.square"
"blocks.{n}.self.key.weight" = "{n}.square"
"blocks.{n}.self.value.weight" = "{n}.square"
"blocks.{n}.self.output.weight" = "{n}.square"
"blocks.{n}.self.norm.weight" = "{n}.norm"
"blocks.{n}.feed_forward.up.weight" = "{n}.up"
"blocks.{n}.feed_forward.down.weight" = "{n}.down"
"blocks.{n}.feed_forward.norm.weight" = "{n}.norm"
"""

HEAD = 'name = "a"\nfile = "file.safetensors"\n'
GENERAL = HEAD + 'kind = "general"\n'
PLAIN = GENERAL + 'parameters = { score.weight = "w" }\n'
