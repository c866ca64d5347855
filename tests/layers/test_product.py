"""Products of rows with one weight, on every library's path: their results, and what these may depend on."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import random_layers as make
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve_server.devices.compute import MAX_ROWS, ROWS
from attnserve_server.devices.cpu import SPLIT_FLOPS, CpuDevice
from attnserve_server.layers import product
from attnserve_server.layers.product import packs, product_of, products_of
from attnserve_server.layers.specification import Dtype, Embedding, Norm, Transformer
from attnserve_server.native.library import Threads, available, best
from attnserve_server.native.products import Products

PATHS: dict[str, Callable[[torch.dtype], bool]] = {
    "as chosen here": packs,
    "without a library": packs,
    "torch's own": lambda dtype: False,
}
EVERY_PATH = pytest.mark.parametrize("path", PATHS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", make.DTYPES)
ONEDNN = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")),
    reason="this torch has no oneDNN",
)
PACKED = pytest.mark.skipif(not packs(torch.float32), reason="no weight is packed on this machine")

FEW = settings(max_examples=max(12, settings().max_examples // 6))
WIDTHS = st.sampled_from([16, 48, 208, 384, 640, 1536])
OUTPUTS = st.sampled_from([1, 5, 16, 77, 128, 384, 1100])


@pytest.fixture(scope="module", autouse=True)
def device(devices: dict[int, CpuDevice]) -> CpuDevice:
    """A device with torch's threads set as on the server."""
    return devices[1]


def made(path: str, weight: torch.Tensor, bias: torch.Tensor | None) -> product.Product:
    """A product on one of the paths."""
    library = best("auto") if path == "as chosen here" else None
    products = None if library is None else Products(library.instructions, lambda flops: Threads())
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(product, "packs", PATHS[path])
        return product_of(weight, bias, products)


def weight_and_bias(outputs: int, inputs: int, dtype: Dtype, biased: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = (make.random_rows(outputs, inputs, 1).double() / inputs**0.5).to(make.torch_dtype(dtype))
    return weight, make.random_rows(1, outputs, 2, dtype)[0] if biased else None


@EVERY_PATH
@EVERY_DTYPE
@FEW
@given(outputs=OUTPUTS, inputs=WIDTHS, biased=st.booleans(), blocks=st.integers(0, 8))
def test_it_is_the_product(path: str, dtype: Dtype, outputs: int, inputs: int, biased: bool, blocks: int) -> None:
    weight, bias = weight_and_bias(outputs, inputs, dtype, biased)
    rows = make.random_rows(blocks * ROWS, inputs, 3, dtype)
    with torch.inference_mode():
        found = made(path, weight, bias)(rows)
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.dtype == rows.dtype
    assert found.is_contiguous()
    bound = {"float64": 1e-13, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    np.testing.assert_allclose(found.double().numpy(), exact.numpy(), rtol=0, atol=bound)


@EVERY_PATH
@EVERY_DTYPE
@FEW
@given(
    outputs=OUTPUTS,
    inputs=WIDTHS,
    biased=st.booleans(),
    blocks=st.integers(1, MAX_ROWS // ROWS),
    data=st.data(),
)
def test_a_rows_bits_do_not_depend_on_other_rows(
    path: str, dtype: Dtype, outputs: int, inputs: int, biased: bool, blocks: int, data: st.DataObject
) -> None:
    """Any number of rows that the device passes, and any position among them."""
    multiply = made(path, *weight_and_bias(outputs, inputs, dtype, biased))
    rows = make.random_rows(MAX_ROWS, inputs, 3, dtype)
    first = data.draw(st.integers(0, MAX_ROWS // ROWS - blocks)) * ROWS
    own = slice(first, first + blocks * ROWS)
    with torch.inference_mode():
        everything, some, moved = multiply(rows), multiply(rows[own]), multiply(rows[own].flip(0))
    np.testing.assert_array_equal(make.bits_of(some), make.bits_of(everything[own]))
    np.testing.assert_array_equal(make.bits_of(moved.flip(0)), make.bits_of(some))


def test_nor_do_they_with_avx2_alone() -> None:
    """As on older processors, as far as MKL and oneDNN can be told to behave so."""
    fewer = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    program = [sys.executable, str(Path(__file__).with_name("product_bits.py"))]
    found = subprocess.run(program, env={**os.environ, **fewer}, stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout.split() == []


@EVERY_PATH
@EVERY_DTYPE
def test_what_is_not_finite_stays_in_its_row(path: str, dtype: Dtype) -> None:
    multiply = made(path, *weight_and_bias(96, 64, dtype, True))
    rows = make.random_rows(48, 64, 0, dtype)
    spoilt = rows.clone()
    spoilt[17, 3], spoilt[20] = torch.inf, torch.nan
    with torch.inference_mode():
        clean, found = multiply(rows), multiply(spoilt)
    assert not found[17].isfinite().any()
    assert found[20].isnan().all()
    others = [row for row in range(48) if row not in (17, 20)]
    np.testing.assert_array_equal(make.bits_of(found[others]), make.bits_of(clean[others]))


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what oneDNN is known to compute faster: not without oneDNN, nor on a processor that MKL knows how to use."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(product, "is_amd", lambda: True)
    fresh = packs.__wrapped__
    assert [fresh(make.torch_dtype(dtype)) for dtype in make.DTYPES] == [True, False, False, True]
    for module, name, answer in (
        (product, "is_amd", False),
        (torch.backends.cpu, "get_cpu_capability", "AVX2"),
        (torch.backends.mkldnn, "is_available", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda answer=answer: answer)
            assert not any(fresh(make.torch_dtype(dtype)) for dtype in make.DTYPES)


@pytest.mark.parametrize(
    ("packed", "amx", "permitted", "bfloat16"),
    [(False, False, False, True), (True, False, False, False), (False, True, False, False), (False, True, True, True)],
)
def test_what_the_native_library_multiplies(
    packed: bool, amx: bool, permitted: bool, bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 only where oneDNN is not known to compute it faster."""
    monkeypatch.setattr(product, "packs", lambda dtype: packed)
    monkeypatch.setattr(product, "has_amx", lambda: amx)
    library: Any = SimpleNamespace(amx=permitted)
    dtypes = [make.torch_dtype(dtype) for dtype in make.DTYPES]
    assert [product.is_native(dtype, library) for dtype in dtypes] == [True, False, True, bfloat16]
    assert not any(product.is_native(dtype, None) for dtype in dtypes)


@pytest.mark.skipif(not available() and "REQUIRE_NATIVE" not in os.environ, reason="there is no native kernel here")
@pytest.mark.parametrize(
    ("threads", "count", "parallel", "helpers"),
    [
        (2, ROWS, True, [1]),
        (2, ROWS, False, [1]),
        (2, 2 * ROWS, True, [0, 0]),
        (4, 3 * ROWS, True, [3]),
        (4, 3 * ROWS, False, [0, 0, 0]),
    ],
)
def test_products_of_too_few_rows_for_all_threads_are_divided(
    threads: int, count: int, parallel: bool, helpers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of others is computed by ranges of rows: no thread is asked for help that has rows of its own."""
    device = CpuDevice(threads, 0, best("auto"))
    products = products_of(device)
    assert products is not None
    multiply, found = products._multiply, []

    def counted(threads: Threads, *arguments: object) -> int:
        found.append(threads.helpers)
        return multiply(threads, *arguments)

    monkeypatch.setattr(products, "_multiply", counted)
    weight, bias = weight_and_bias(1024, 512, "float32", True)
    rows = make.random_rows(count, 512, 0)
    with torch.inference_mode():
        result = device.rows(product_of(weight, bias, products), rows, flops=SPLIT_FLOPS, parallel=parallel)
    device.close()
    np.testing.assert_allclose(result, rows @ weight.T + bias, rtol=0, atol=1e-4)
    assert found == helpers


@ONEDNN
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_weight_is_multiplied_by_onednn(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another library would be chosen; it is not divided."""
    monkeypatch.setattr(product, "packs", lambda dtype: True)
    weight, bias = weight_and_bias(77, 48, "float32", biased)
    rows = make.random_rows(40, 48, 3)
    with torch.inference_mode():
        multiply = product_of(weight, bias, None)
        found = multiply(rows)
    np.testing.assert_allclose(found, rows @ weight.T + (0 if bias is None else bias), rtol=0, atol=1e-5)
    with pytest.raises(TypeError, match="for one product"):
        multiply.part(slice(0, 16))


@ONEDNN
def test_onednn_generates_code_for_cheap_products_when_a_shape_is_first_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "packs", lambda dtype: True)
    monkeypatch.setattr(product, "_generated", set())
    monkeypatch.setattr(product, "GENERATION_FLOPS", 2 * 3 * ROWS * 32 * 48)
    found: list[tuple[torch.Size, torch.dtype]] = []
    monkeypatch.setattr(product._OneDnnProduct, "__call__", lambda _, rows: found.append((rows.shape, rows.dtype)))
    wanted = [(torch.Size([count * ROWS, 48]), torch.float32) for count in (1, 2, 3)]
    weight, bias = weight_and_bias(32, 48, "float32", True)
    product_of(weight, bias, None)
    assert found == wanted
    product_of(weight + 1, bias, None)
    assert found == wanted, "once for each shape"
    product_of(weight, None, None)
    assert found == 2 * wanted
    monkeypatch.setattr(product, "GENERATION_FLOPS", 2 * MAX_ROWS * 16 * 48)
    product_of(weight[:16], None, None)
    assert [shape[0] for shape, _ in found[6:]] == [*range(ROWS, MAX_ROWS + 1, ROWS)]


def test_a_weight_is_packed_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "packs", lambda dtype: True)
    assert not product.divides(torch.zeros(16, 16), None)
    assert product.divides(torch.zeros(16, 16, device="meta"), None)


@pytest.mark.parametrize(
    ("dtype", "on_cpu"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float16, torch.float32)],
)
def test_torch_multiplies_a_limited_number_of_rows_on_a_cpu(
    dtype: torch.dtype, on_cpu: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there float16 as float32."""
    monkeypatch.setattr(product, "packs", lambda dtype: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    found: list[int] = []

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found.append(len(rows))
        assert rows.dtype == (on_cpu if rows.device.type == "cpu" else dtype)
        return torch.nn.functional.linear(rows, weight, bias)

    monkeypatch.setattr(product, "linear", linear)
    most = product.most_rows(dtype)
    for device in ("cpu", "meta"):
        multiply = product_of(torch.zeros(16, 16, dtype=dtype, device=device), None, None)
        for count in (1, most, 2 * most + 1):
            assert multiply(torch.zeros(count, 16, dtype=dtype, device=device)).shape == (count, 16)
    assert found == [1, most, most, most, 1, 1, most, 2 * most + 1]


def test_how_many_rows_torch_multiplies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured: in float32, float64, float16 and bfloat16."""
    for capability, wanted in (
        ("AVX512", [MAX_ROWS, 4 * ROWS, MAX_ROWS, 2 * ROWS]),
        ("AVX2", [ROWS, ROWS, ROWS, 2 * ROWS]),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        dtypes = torch.float32, torch.float64, torch.float16, torch.bfloat16
        assert [product.most_rows(dtype) for dtype in dtypes] == wanted


@PACKED
def test_a_packed_weight_is_there_once(device: CpuDevice) -> None:
    """Nothing holds the tensor that it was packed from; embedding tables are used as they are, and stay."""
    architecture = Transformer(
        blocks=2,
        block=make.block(32, 4, 48, crossed=True, pre_norm=True),
        embedding=Embedding(width=32, vocabulary=50),
        final_norm=Norm(kind="layer", width=32, epsilon=1e-5),
    )
    for architecture_, kept in ((architecture, ["embedding.token.weight"]), (make.attention(32, 4), [])):
        parameters = make.random_parameters(architecture_)
        weights = {name: weakref.ref(value) for name, value in parameters.items() if value.dim() == 2}
        layer = make.layer_of(architecture_, parameters, device)
        del parameters
        assert [name for name, weight in weights.items() if weight() is not None] == kept
        assert layer.specification.name


@PACKED
def test_no_thread_computes_but_the_one_that_asks() -> None:
    """Even in a thread new to torch: oneDNN would start one for each processor."""
    weight, _ = weight_and_bias(512, 512, "float32", False)
    multiply = made("without a library", weight, None)
    rows = make.random_rows(MAX_ROWS, 512, 0)

    def started() -> int:
        before = len(os.listdir("/proc/self/task"))
        with torch.inference_mode():
            multiply(rows)
        return len(os.listdir("/proc/self/task")) - before

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(started).result() <= 0


def test_queries_keys_and_values_of_the_same_rows_are_one_product(
    tensor_devices: dict[int, CpuDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where weights are not packed; these rows and rows with other keys share one copy of the weight."""
    monkeypatch.setattr(product, "packs", lambda dtype: False)
    multiplied: list[torch.Tensor] = []

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        multiplied.append(weight)
        return torch.nn.functional.linear(rows, weight, bias)

    monkeypatch.setattr(product, "linear", linear)
    architecture = make.attention(48, 3, kv_heads=1, causal=True, query_bias=False)
    layer = make.layer_of(architecture, make.random_parameters(architecture), tensor_devices[1])
    own = make.packed(make.random_rows(12, 48, 0))
    crossed = make.packed(make.random_rows(12, 48, 0), context=own.input, context_lengths=[12])
    (one,) = make.run(layer, own)
    assert [len(weight) for weight in multiplied] == [48 + 16 + 16, 48]
    (other,) = make.run(layer, crossed)
    assert [len(weight) for weight in multiplied[2:]] == [48, 16 + 16, 48]
    assert len({weight.untyped_storage().data_ptr() for weight in multiplied}) == 2
    torch.testing.assert_close(one.output, other.output, rtol=0, atol=1e-5)
