"""Which native kernel a server has: by its setting, by what was built, by what the processor supports."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import oracle
import pytest
from binding import needs_native
from conftest import Server

from attnserve import Client
from attnserve_server.devices import DeviceError, open_device
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library, sources

NATIVE = Path(library.__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def native_library() -> bytes:
    """The built library, or nothing if it was not built."""
    return library.PATH.read_bytes() if library.PATH.exists() else b""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty directory in which the library is looked for instead."""
    library._found.cache_clear()
    monkeypatch.setattr(library, "PATH", tmp_path / "attention.so")
    yield tmp_path
    library._found.cache_clear()


def instructions(device: object) -> str | None:
    assert isinstance(device, CpuDevice)
    return None if device.native is None else device.native.library.instructions


def test_it_is_here_where_tests_must_not_be_skipped() -> None:
    if "REQUIRE_NATIVE" not in os.environ:
        pytest.skip("it may be missing")
    assert library.available()


def test_the_best_is_taken_unless_another_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    names = {"AVX-512": "avx512", "AVX2": "avx2"}
    assert instructions(open_device("cpu", 1, 0, "auto")) == (library.available() or (None,))[0]
    assert instructions(open_device("cpu", 1, 0, "off")) is None
    for name in library.available():
        assert instructions(open_device("cpu", 1, 0, names[name])) == name
    for name in names.keys() - set(library.available()):
        with pytest.raises(DeviceError, match="is not available"):
            open_device("cpu", 1, 0, names[name])
    assert bool(caplog.messages) == (not library.available())


@pytest.mark.usefixtures("elsewhere")
def test_where_it_was_not_built_torch_computes_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert instructions(open_device("cpu", 1, 0, "off")) is None
    assert not caplog.messages
    assert instructions(open_device("cpu", 1, 0, "auto")) is None
    assert [(record.levelno, "native kernel is not available" in record.message) for record in caplog.records] == [
        (logging.WARNING, True)
    ]
    with pytest.raises(DeviceError, match="avx2 is not available: there is none"):
        open_device("cpu", 1, 0, "avx2")


def of_another_architecture(built: bytes) -> bytes:
    """The library with another machine in its ELF header."""
    return built[:18] + (183).to_bytes(2, "little") + built[20:]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("int other;", "undefined symbol"),
        (
            "int attnserve_instructions(void) { return 2; } int attnserve_call_bytes(void) { return 8; }",
            "is of another version",
        ),
    ],
)
@needs_compiler
def test_a_library_that_is_not_this_kernel_is_none(elsewhere: Path, source: str, why: str) -> None:
    (elsewhere / "other").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(elsewhere / "attention.so"), str(elsewhere / "other")]
    subprocess.run(command, check=True)
    assert library.available() == ()
    assert why in library.hindrance()


@pytest.mark.parametrize("content", [b"no library", of_another_architecture(native_library())], ids=["no", "other"])
def test_what_cannot_be_loaded_is_none_and_the_log_says_why(
    elsewhere: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (elsewhere / "attention.so").write_bytes(content)
    assert library.available() == ()
    assert instructions(open_device("cpu", 1, 0, "auto")) is None
    assert "the native kernel is not available, because it cannot be loaded" in caplog.text
    with pytest.raises(DeviceError, match="avx2 is not available: there is none, since it cannot be loaded"):
        open_device("cpu", 1, 0, "avx2")


@needs_native
def test_one_that_was_not_made_of_the_sources_beside_it_is_none(
    elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (*NATIVE.glob("*.[ch]"), NATIVE / "attention.so"):
        shutil.copyfile(path, elsewhere / path.name)
    for date in (0, 2**31):  # copying may make either file the older
        os.utime(elsewhere / "kernel.h", (date, date))
        library._found.cache_clear()
        assert library.available()
    library._found.cache_clear()
    (elsewhere / "kernel.h").write_bytes((NATIVE / "kernel.h").read_bytes() + b"\n")
    os.utime(elsewhere / "kernel.h", (0, 0))
    with pytest.warns(RuntimeWarning, match="was not made of the sources beside it: python hatch_build.py"):
        assert instructions(open_device("cpu", 1, 0, "auto")) is None
    assert "the native kernel is not available, because" in caplog.text
    assert "was not made of the sources beside it" in caplog.text


@needs_native
def test_one_without_sources_is_what_was_installed(elsewhere: Path) -> None:
    shutil.copyfile(NATIVE / "attention.so", elsewhere / "attention.so")
    assert library.available()


def test_the_digest_is_of_names_contents_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**contents: str) -> str:
        shutil.rmtree(tmp_path / "sources", ignore_errors=True)
        for name, content in contents.items():
            path = tmp_path / "sources" / name.replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        return sources.digest(tmp_path / "sources")

    both = {"a_c": "1", "b_h": "2"}
    assert digest(**both) == digest(**both, c_py="3") == digest(b_h="2", a_c="1")
    others = [{"a_c": "1"}, {"a_c": "1", "b_h": "3"}, {"a_c": "1", "d_h": "2"}, {"a_c": "2", "b_h": "1"}]
    assert len({digest(**contents) for contents in (both, *others)}) == 5
    before = digest(**both)
    monkeypatch.setattr(sources, "FLAGS", (*sources.FLAGS, "-O2"))
    assert digest(**both) != before


@pytest.mark.parametrize("wanted", ["off", *(name.replace("-", "").lower() for name in library.available()[-1:])])
def test_a_server_says_which_it_has_and_computes_by_it(start_server: Callable[..., Server], wanted: str) -> None:
    server = start_server(f"--native-kernel={wanted}")
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 20, 16), np.float32)
    with Client(server.address) as client:
        output = client.attend(query, key, value, causal=True).output
        kernels = {kernel.name: kernel.description for kernel in client.server_info().kernels}
    np.testing.assert_allclose(output, oracle.attend(query, key, value, causal=True).output, atol=2e-6)
    assert server.startup["kernels"].split(", ") == list(kernels)
    assert (library.NAME in kernels) == (wanted != "off")
    if wanted != "off":
        assert library.available()[-1] in kernels[library.NAME]
