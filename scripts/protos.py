"""The protos' workshop: generates code from `protos/`, checks that it is in step, lints it, guards compatibility.

In: `protos/attnserve/v1/*.proto`, `buf.yaml`, `protos/baseline.binpb` (the protocol that must not break).
Out: `client/attnserve/v1/*_pb2.py`, `.pyi` and `*_pb2_grpc.py`; or what is wrong, on stderr, and exit code 1.

    python scripts/protos.py generate    writes the generated code
    python scripts/protos.py check       lint, breaking and generated code in step
    python scripts/protos.py baseline    makes today's protocol the baseline; refuses if it breaks the last one
    python scripts/protos.py descriptors FILE    writes the protocol, its imports and the details of errors as one file
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PROTOS: Final = ROOT / "protos"
GENERATED: Final = ROOT / "client"
BASELINE: Final = PROTOS / "baseline.binpb"
PACKAGE: Final = Path("attnserve/v1")
ERROR_DETAILS: Final = "google/rpc/error_details.proto"
"""The messages in the details of a google.rpc.Status, which none of our protos imports."""


class ProtoError(Exception):
    """A problem with the protos; the message is the tool's output."""


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ProtoError((done.stdout + done.stderr).strip() or f"{command[0]} exited with {done.returncode}")


def _protoc(sources: Sequence[str | Path], *options: str | Path) -> None:
    rpc = find_spec("google.rpc")  # google/rpc/status.proto is installed beside its generated code
    if rpc is None or not rpc.submodule_search_locations:
        raise ProtoError("googleapis-common-protos is not installed")
    google = Path(next(iter(rpc.submodule_search_locations))).parent.parent
    _run(sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"-I{google}", *options, *sources)


def sources() -> list[Path]:
    """The proto files, in a fixed order."""
    return sorted((PROTOS / PACKAGE).glob("*.proto"))


def has_service(source: Path) -> bool:
    """Whether a proto file declares a service, and so has a `_pb2_grpc.py`."""
    return any(line.startswith("service ") for line in source.read_text().splitlines())


def generate(destination: Path) -> list[Path]:
    """Writes the generated code below a directory, and returns the files' paths relative to the directory."""
    services = [source for source in sources() if has_service(source)]
    _protoc(sources(), f"--python_out={destination}", f"--pyi_out={destination}")
    _protoc(services, f"--grpc_python_out={destination}")
    names = [f"{source.stem}_pb2{suffix}" for source in sources() for suffix in (".py", ".pyi")]
    names += [f"{source.stem}_pb2_grpc.py" for source in services]
    return sorted(PACKAGE / name for name in names)


def descriptor_set(destination: Path, *others: str, comments: bool) -> Path:
    """Writes the descriptor set of the protos, of `others` and of all imports, with or without comments."""
    options = ["--include_source_info"] if comments else []
    _protoc([*sources(), *others], f"--descriptor_set_out={destination}", "--include_imports", *options)
    return destination


def check_generated() -> None:
    """Checks that the committed code is what the protos generate, file by file, with none left over."""
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        expected = generate(fresh)
        committed = {path.relative_to(GENERATED) for path in (GENERATED / PACKAGE).glob("*_pb2*.py*")}
        stale = committed.symmetric_difference(expected)
        stale |= {path for path in committed.intersection(expected) if not same(fresh / path, GENERATED / path)}
    if stale:
        raise ProtoError(f"run `make protos`; not in step: {', '.join(str(path) for path in sorted(stale))}")


def same(one: Path, other: Path) -> bool:
    """Whether two files have the same bytes."""
    return one.read_bytes() == other.read_bytes()


def lint() -> None:
    """Checks the protos by buf's rules, as chosen in `buf.yaml`."""
    with tempfile.TemporaryDirectory() as directory:
        _run(_buf(), "lint", descriptor_set(Path(directory) / "protos.binpb", comments=True))


def breaking(baseline: Path = BASELINE) -> None:
    """Checks that nothing has changed that callers of the baseline rely on."""
    with tempfile.TemporaryDirectory() as directory:
        image = descriptor_set(Path(directory) / "protos.binpb", comments=True)
        _run(_buf(), "breaking", image, "--against", baseline)


def _buf() -> Path:
    buf = Path(sys.executable).parent / "buf"
    if not buf.exists():
        raise ProtoError("buf is not installed in this environment (the package is buf-bin)")
    return buf


def check() -> None:
    """Runs all checks; raises ProtoError with everything that is wrong."""
    problems = []
    for step in (lint, breaking, check_generated):
        try:
            step()
        except ProtoError as error:
            problems.append(f"{step.__name__}: {error}")
    if problems:
        raise ProtoError("\n".join(problems))


def renew_baseline() -> None:
    """Makes the current protocol the one that later ones are compared with."""
    if BASELINE.exists():
        breaking()
    descriptor_set(BASELINE, comments=False)


def main(*arguments: str) -> int:
    """Runs one command, and prints what went wrong."""
    try:
        match arguments:
            case ["generate"]:
                generate(GENERATED)
            case ["check"]:
                check()
            case ["baseline"]:
                renew_baseline()
            case ["descriptors", destination]:
                Path(destination).parent.mkdir(parents=True, exist_ok=True)
                descriptor_set(Path(destination), ERROR_DETAILS, comments=True)
            case _:
                raise ProtoError(f"no such command: {' '.join(arguments)!r}\n\n{__doc__}")
    except ProtoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
