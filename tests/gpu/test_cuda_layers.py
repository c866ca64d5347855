"""Layers through a real server on a CUDA device, against the modules that their checkpoints come from.

With `GPU_TESTS_ON=cpu` it runs on a CPU, to check the tests themselves without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from applied import CONTEXT_LENGTHS, FLOAT32, LENGTHS, assert_near, contexts, packed, references, sequences, typed
from checkpoints import CHECKPOINTS
from conftest import Models, served
from occupied import PATIENT
from torch.nn.utils.rnn import pad_sequence

from attnserve import Client

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
EVERY_LAYER = pytest.mark.parametrize("name", CHECKPOINTS)
DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@pytest.fixture(scope="module")
def client(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server on that device that has loaded all of them."""
    flags = ("--device", DEVICE, "--layers", str(models.directory / "layers.toml"), "--cache-bytes", "64MiB", *PATIENT)
    with served(flags, tmp_path_factory.mktemp("cuda-layers")) as server, Client(server.address) as client:
        yield client


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(3)
    with torch.inference_mode():
        yield


def resident(name: str, dtype: torch.dtype) -> tuple[str, float]:
    """The layer of a checkpoint in a dtype, and how far it may be off."""
    if dtype == torch.float64:
        return name, CHECKPOINTS[name].tolerance
    return f"{name}/float32", FLOAT32


@EVERY_LAYER
@DTYPE
def test_a_layer_gives_what_its_module_gives(client: Client, models: Models, name: str, dtype: torch.dtype) -> None:
    """Packed, padded, and each sequence by itself, all in flight at once."""
    layer, (applied, tolerance) = CHECKPOINTS[name], resident(name, dtype)
    xs, zs = sequences(layer), contexts(layer)
    expected = references(layer, models.modules[name], xs, zs)
    x, options = packed(xs, zs, dtype)
    together = client.submit_apply(applied, x, **options)
    rows = [typed(x, dtype) for x in xs]
    padded_options = {"lengths": options["lengths"]}
    own = [{} if zs is None else {"context": zs[n].to(dtype)} for n in range(len(xs))]
    if zs is not None:
        padded_options["context"] = pad_sequence([z.to(dtype) for z in zs], True)
        padded_options["context_lengths"] = CONTEXT_LENGTHS
    padded = client.submit_apply(applied, pad_sequence(rows, True), **padded_options)
    alone = [client.submit_apply(applied, row, **own[n]) for n, row in enumerate(rows)]
    assert_near(together.result().output, expected, tolerance)
    found = padded.result().output
    assert_near(torch.cat([found[n, :length] for n, length in enumerate(LENGTHS)]), expected, tolerance)
    assert_near(torch.cat([each.result().output for each in alone]), expected, tolerance)


@pytest.mark.parametrize("name", ["gpt2", "llama", "decoder/stack"])
@pytest.mark.parametrize("chunks", [[12], [7, 5], [1] * 12])
def test_a_decoder_over_its_cache(client: Client, models: Models, name: str, chunks: list[int]) -> None:
    """A sequence that comes in chunks, with its keys and values in a cache."""
    layer, (applied, tolerance) = CHECKPOINTS[name], resident(name, torch.float32)
    xs, zs = sequences(layer, [sum(chunks)]), contexts(layer)
    zs = None if zs is None else zs[:1]
    expected = references(layer, models.modules[name], xs, zs)
    options = {} if zs is None else {"context": zs[0].float()}
    outline = client.layers.get(applied)
    with client.create_cache(
        outline.num_kv_heads, outline.head_dim, value_dim=outline.value_dim, layers=outline.blocks, dtype="float32"
    ) as cache:
        parts = torch.split(typed(xs[0], torch.float32), chunks)
        found = torch.cat([client.apply(applied, part, cache=cache, **options).output for part in parts])
    assert_near(found, expected, max(tolerance, 1e-5))
