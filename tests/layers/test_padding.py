"""The share of padding among the rows of batches, as the metrics of a server tell it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import calls
import numpy as np
import pytest
from checkpoints import WIDTH
from conftest import Server
from scores import X, write

from attnserve import Client
from attnserve_server.native.library import available

METRIC = "attnserve_batch_padding_ratio"


def told(server: Server) -> tuple[float, float]:
    """The shares of all batches so far, added up, and the number of batches."""
    _, page = calls.get(server.http_address, "/metrics")
    return calls.value(page, f"{METRIC}_sum"), calls.value(page, f"{METRIC}_count")


@contextmanager
def padded(server: Server, share: float) -> Iterator[None]:
    """Holds that what is asked meanwhile is one batch, of which such a share is padding."""
    total, batches = told(server)
    yield
    total_now, batches_now = told(server)
    assert batches_now - batches == 1
    assert total_now - total == pytest.approx(share, abs=1e-9)


def rows(length: int, dtype: str = "float64") -> Any:
    return np.random.default_rng(length).standard_normal((length, WIDTH)).astype(dtype)


@pytest.mark.parametrize(
    ("layer", "length", "options", "share"),
    [
        ("encoder/relu/post", 5, {}, 11 / 16),
        ("encoder/relu/post", 16, {}, 0),
        ("encoder/relu/post", 17, {}, 15 / 32),
        ("encoder/relu/post", 11, {"lengths": [5, 6]}, 5 / 16),
        ("encoder/relu/post", 0, {}, 0),
        ("decoder/relu/post", 5, {"context": rows(20)}, 23 / 48),
        ("original/encoder_self", 4, {"width": 512}, 12 / 16),
        ("original/encoder_decoder", 4, {"width": 512, "context": np.ones((17, 512))}, 27 / 48),
    ],
)
def test_layers_whose_rows_are_filled_up(
    layer_server: Server, layer_client: Client, layer: str, length: int, options: Mapping[str, Any], share: float
) -> None:
    """Products in float64 are torch's: with what must be a multiple of 16 rows."""
    given = dict(options)
    width = given.pop("width", WIDTH)
    x = rows(length) if width == WIDTH else np.ones((length, width))
    with padded(layer_server, share):
        assert layer_client.apply(layer, x, **given).output.shape == (length, width)


def test_what_a_caller_pads_is_not_computed(layer_server: Server, layer_client: Client) -> None:
    with padded(layer_server, 5 / 16):
        layer_client.apply("encoder/relu/post", rows(80).reshape(2, 40, WIDTH), lengths=[5, 6])


@pytest.mark.skipif(not available() and "REQUIRE_NATIVE" not in os.environ, reason="there is no native kernel here")
def test_rows_that_the_library_computes_are_not_filled_up(layer_server: Server, layer_client: Client) -> None:
    """By itself or, since a reply needs more, with the kernels of attention."""
    x = np.ones((5, 512), np.float32)
    for options in ({}, {"return_lse": True}):
        with padded(layer_server, 0):
            layer_client.apply("original/encoder_self/float32", x, **options)


def test_attention_without_a_layer_has_none(layer_server: Server, layer_client: Client) -> None:
    query = np.ones((2, 3, 16), np.float32)
    for options in ({}, {"return_scores": "weights"}, {"kv_lengths": [2]}):
        with padded(layer_server, 0):
            layer_client.attend(query[None], query[None], query[None], **options)


def test_scores_without_values_compute_no_rows(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Such a layer is nothing but its kernel."""
    directory = tmp_path / "models"
    directory.mkdir()
    write(directory)
    server = start_server("--layers", str(directory / "layers.toml"))
    with Client(server.address) as client, padded(server, 0):
        client.apply("one", X)
