"""Multi-head layers computed by one call of the native library, on a server, beside others that take another path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import random_layers as make
from bits import assert_same_bits
from conftest import Server
from forward import attended
from safetensors.torch import save_file

from attnserve import AsyncClient

WIDTH: Final = 48
ARCHITECTURE: Final = make.attention(WIDTH, 4, causal=True)
NAMES: Final = ("query", "key", "value", "output")
DEFINITION: Final = (
    '[[layers]]\nname = "heads"\nkind = "multi_head"\nfile = "heads.safetensors"\nheads = 4\ncausal = true\n'
    "[layers.parameters]\n"
    + "".join(f'{name}.{each} = "{name}.{each}"\n' for name in NAMES for each in ("weight", "bias"))
)


@pytest.mark.parametrize(("transport", "dtype", "near"), [("stream", "float32", 5e-6), ("unary", "float16", 5e-3)])
async def test_all_at_once(
    start_server: Callable[..., Server],
    tmp_path: Path,
    transport: Literal["stream", "unary"],
    dtype: make.Dtype,
    near: float,
) -> None:
    """Requests for output alone, requests that ask for more, and non-finite ones: each gets its own reply, with the
    bits that it has alone.
    """
    parameters = make.random_parameters(ARCHITECTURE, 3, dtype)

    def rows_of(length: int, seed: int) -> Any:
        return np.random.default_rng(seed).standard_normal((length, WIDTH), np.float32).astype(dtype)

    def exact(rows: Any) -> Any:
        rows = rows.astype(np.float64)
        return attended(rows, rows, ARCHITECTURE, make.doubles(parameters))[0]

    save_file(dict(parameters), tmp_path / "heads.safetensors")
    (tmp_path / "layers.toml").write_text(DEFINITION)
    server = start_server("--layers", str(tmp_path / "layers.toml"))
    rows = [rows_of(length, seed) for seed, length in enumerate([16, 1, 40, 16, 7] * 8)]
    rows[13] = rows[13].copy()
    rows[13][5] = np.nan
    asked: list[dict[str, Any]] = [{"return_lse": True} if n % 5 == 3 else {} for n in range(len(rows))]
    async with AsyncClient(server.address, transport=transport) as client:
        alone = [await client.apply("heads", each, **own) for each, own in zip(rows, asked, strict=True)]
        calls = (client.apply("heads", each, **own) for each, own in zip(rows, asked, strict=True))
        together = await asyncio.gather(*calls)
    for n, (own, one, found) in enumerate(zip(rows, alone, together, strict=True)):
        assert found.output.dtype == dtype
        assert_same_bits(found.output, one.output)
        assert (found.lse is not None) == (n % 5 == 3)
        whole = slice(5 if n == 13 else None)
        np.testing.assert_allclose(found.output[whole].astype(np.float64), exact(own)[whole], rtol=0, atol=near)
        assert np.isfinite(found.output[whole]).all()
        assert np.isnan(found.output[5:]).all() or n != 13
