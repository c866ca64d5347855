"""What gets installed: the wheel's content, the SDK's dependencies, and the single source of the version."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import attnserve._version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attnserve", "attnserve_server")
LIBRARY = "attnserve_server/native/attention.so"
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and "REQUIRE_NATIVE" not in os.environ, reason="there is no C compiler"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(directory))
    return Path(path)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    directory = tmp_path_factory.mktemp("sdist")
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(directory))
    with tarfile.open(path) as archive:
        archive.extractall(directory, filter="data")
    (root,) = (each for each in directory.iterdir() if each.is_dir())
    return root


@pytest.fixture(scope="module")
def compiled(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution, and a wheel built from it."""
    root = tmp_path_factory.mktemp("compiled") / "attnserve"
    shutil.copytree(unpacked, root)
    built, _ = built_from(root)
    return root, built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def required(metadata: Message, extra: str = "") -> set[str]:
    """The names of the direct requirements, with an extra or with none."""
    found = (Requirement(line) for line in metadata.get_all("Requires-Dist", []))
    return {
        canonicalize_name(requirement.name)
        for requirement in found
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    }


def test_the_wheel_holds_every_module_of_both_packages_and_nothing_else(names: set[str]) -> None:
    sources = [ROOT / "client" / "attnserve", ROOT / "server" / "attnserve_server"]
    modules = {str(path.relative_to(source.parent)) for source in sources for path in source.rglob("*.py")}
    assert modules
    typed = {f"{package}/py.typed" for package in PACKAGES}
    stubs = {str(path.relative_to(ROOT / "client")) for path in (ROOT / "client").rglob("*.pyi")}
    assert stubs
    assert modules | typed | stubs <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)


def test_the_sdk_is_light(metadata: Message) -> None:
    assert required(metadata) == {"grpcio", "grpcio-status", "ml-dtypes", "numpy", "protobuf", "typing-extensions"}
    assert "torch" in required(metadata, "server")


def test_dependencies_of_the_sdk_do_not_lead_to_torch(metadata: Message) -> None:
    """Resolved through the packages installed here, as pip would."""
    reached: set[str] = set()
    ahead = required(metadata)
    while ahead:
        name = ahead.pop()
        reached.add(name)
        for line in requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                ahead |= {canonicalize_name(requirement.name)} - reached
    assert {"numpy", "googleapis-common-protos"} <= reached
    assert not reached & {"torch", "transformers", "prometheus-client", "safetensors"}


def test_the_version_is_written_once(metadata: Message) -> None:
    version = attnserve._version.__version__
    assert metadata["Version"] == version
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pattern = re.compile(rf"""__version__\s*=\s*["']{re.escape(version)}["']""")
    sources = [path for folder in ("client", "server") for path in (ROOT / folder).rglob("*.py")]
    places = [path for path in sources if pattern.search(path.read_text())]
    assert places == [ROOT / "client" / "attnserve" / "_version.py"]


def test_console_scripts_lead_somewhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        scripts = dict(re.findall(r"^(\S+) = (\S+)$", archive.read(name).decode(), re.MULTILINE))
    assert scripts == {
        "attnserve": "attnserve._commands.cli:main",
        "attnserve-server": "attnserve_server.__main__:main",
    }
    for target in scripts.values():
        module, _, function = target.partition(":")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        assert f"def {function}(" in Path(spec.origin).read_text()


def test_constraints_pin_every_dependency(metadata: Message) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if is_pin(line)]
    assert all(re.fullmatch(r"==[^*,+]+", str(pin.specifier)) for pin in pins)
    pinned = {canonicalize_name(pin.name) for pin in pins}
    extras = metadata.get_all("Provides-Extra", [])
    direct = set().union(*(required(metadata, extra) for extra in ("", *extras))) - {"attnserve"}
    assert {"torch", "numpy", "pytest"} <= direct
    assert direct <= pinned


def test_pins_lie_within_the_ranges(metadata: Message) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    ranges = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    for pin in map(Requirement, filter(is_pin, lines)):
        version = str(pin.specifier).removeprefix("==")
        for requirement in ranges:
            if canonicalize_name(requirement.name) == canonicalize_name(pin.name):
                assert requirement.specifier.contains(version), f"{pin} is not within {requirement}"


@pytest.mark.parametrize("name", ["grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "uvloop"])
def test_what_is_used_more_closely_than_its_documents_say_ends_before_its_next_major_version(
    metadata: Message, name: str
) -> None:
    """Such as the socket by which gRPC tells of events, and the functions of libuv inside of uvloop."""
    (pin,) = (
        pin
        for pin in map(Requirement, filter(is_pin, (ROOT / "constraints.txt").read_text().splitlines()))
        if canonicalize_name(pin.name) == name
    )
    pinned = Version(str(pin.specifier).removeprefix("=="))
    ranges = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    own = [requirement for requirement in ranges if canonicalize_name(requirement.name) == name]
    assert own
    for requirement in own:
        assert requirement.specifier.contains(f"{pinned.major}.{pinned.minor + 100}")
        assert not requirement.specifier.contains(f"{pinned.major + 1}.0")


def test_every_python_has_one_pin_of_a_package() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if is_pin(line)]
    for minor in range(11, 20):
        python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
        names = [canonicalize_name(pin.name) for pin in pins if pin.marker is None or pin.marker.evaluate(python)]
        assert len(names) == len(set(names))
        assert {canonicalize_name(pin.name) for pin in pins} == set(names)


def is_pin(line: str) -> bool:
    return bool(line) and not line.startswith("#")


@needs_compiler
def test_the_wheel_holds_the_native_kernel_and_is_one_for_this_platform(wheel: Path, names: set[str]) -> None:
    assert LIBRARY in names
    assert not any(name.endswith((".c", ".h")) for name in names)
    assert re.fullmatch(r"attnserve-\S+-py3-none-linux_x86_64\.whl", wheel.name)


def test_the_source_distribution_holds_all_that_is_compiled_and_nothing_that_was(unpacked: Path) -> None:
    native = ROOT / "server" / "attnserve_server" / "native"
    sources = [
        path.relative_to(ROOT) for path in (*native.glob("*.[ch]"), *native.glob("*.py"), ROOT / "hatch_build.py")
    ]
    assert len(sources) > 5
    assert all((unpacked / source).read_bytes() == (ROOT / source).read_bytes() for source in sources)
    assert not list(unpacked.rglob("*.so"))


@needs_compiler
def test_from_the_source_distribution_comes_the_same_wheel(compiled: tuple[Path, Path], names: set[str]) -> None:
    assert set(zipfile.ZipFile(compiled[1]).namelist()) == names


COMPILER = """
import sys

with open(sys.argv[sys.argv.index("-o") + 1], "w") as made:
    made.write(" ".join(sys.argv))
"""
"""A fake compiler: its output is its own command line, with the definitions that it was given."""


@needs_compiler
def test_it_is_compiled_again_when_and_only_when_sources_have_changed(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    root, _ = compiled
    library = root / "server" / LIBRARY
    (tmp_path / "compiler.py").write_text(COMPILER)
    environment = os.environ | {"CC": shlex.join([sys.executable, str(tmp_path / "compiler.py")])}

    def build() -> bytes:
        subprocess.run([sys.executable, "hatch_build.py"], cwd=root, env=environment, check=True, timeout=250)
        return library.read_bytes()

    before = library.read_bytes()
    assert before.startswith(b"\x7fELF")
    for date in (0, 2**31):
        os.utime(library, (date, date))
        assert build() == before
    header = library.with_name("tiles.h")
    header.write_text(header.read_text() + "\n")
    assert b"-shared" in build()
    inode = library.stat().st_ino
    build()
    assert library.stat().st_ino == inode


@pytest.mark.parametrize(
    ("environment", "warning"),
    [
        ({"CC": "/nonexistent"}, "without its native kernel, since /nonexistent does not run"),
        ({"CC": "", "PATH": "/nonexistent"}, "without its native kernel, since there is no C compiler"),
        ({"CC": "false"}, "without its native kernel, since false -std=gnu11"),
        ({"HATCH_BUILD_NO_HOOKS": "true"}, ""),
    ],
    ids=["not found", "none", "fails", "left out"],
)
def test_without_a_compiler_the_wheel_is_pure_python_and_says_so(
    unpacked: Path, names: set[str], environment: dict[str, str], warning: str
) -> None:
    built, said = built_from(unpacked, **environment)
    assert built.name.endswith("-py3-none-any.whl")
    assert set(zipfile.ZipFile(built).namelist()) == names - {LIBRARY}
    assert warning in said
    assert bool(warning) == ("native kernel" in said)


def built_from(sources: Path, **environment: str) -> tuple[Path, str]:
    """A wheel of these sources, and the output of its build."""
    shutil.rmtree(sources / "dist", ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run(
        command, cwd=sources, env=os.environ | environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = (sources / "dist").iterdir()
    return built, done.stdout + done.stderr
