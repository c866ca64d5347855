"""The image, as far as it can be tested without building it: what the Dockerfile says, and what it refers to."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from manifests import DEPLOY, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attnserve_server import __version__
from attnserve_server.settings import command_line
from attnserve_server.settings.config import Config
from attnserve_server.settings.units import parse_address

DOCKERFILE = DEPLOY / "Dockerfile"
EXTRAS = ("server", "tracing", "top")
"""The image's default extras."""


class Instruction(NamedTuple):
    """One instruction of a Dockerfile, with its stage: 0 for instructions before the first."""

    stage: int
    word: str
    rest: str


def instructions() -> Iterator[Instruction]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stage = 0
    for text in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = text.partition(" ")
        stage += word == "FROM"
        yield Instruction(stage, word, re.sub(r"\s+", " ", rest).strip())


@pytest.fixture(scope="module")
def dockerfile() -> list[Instruction]:
    return list(instructions())


def last_stage(dockerfile: list[Instruction]) -> list[Instruction]:
    return [instruction for instruction in dockerfile if instruction.stage == dockerfile[-1].stage]


def values(dockerfile: list[Instruction], word: str) -> list[str]:
    return [instruction.rest for instruction in dockerfile if instruction.word == word]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_variant_is_a_stage_of_the_same_python(dockerfile: list[Instruction]) -> None:
    build, *variants, last = values(dockerfile, "FROM")
    assert build == "${PYTHON_IMAGE} AS build"
    # A virtual environment refers to its python by path, and works only with that version.
    assert variants == ["${PYTHON_IMAGE} AS cpu", "${PYTHON_IMAGE} AS cuda"]
    assert last == "${VARIANT}"
    devices = [re.findall(r"ATTNSERVE_DEVICE=(\S+)", rest) for rest in values(dockerfile, "ENV")]
    assert [device for found in devices for device in found] == ["cpu", "cuda"]
    for device in ("cpu", "cuda"):
        assert command_line.load([], {"ATTNSERVE_DEVICE": device}).device == device


def test_the_last_stage_only_takes_what_was_installed(dockerfile: list[Instruction]) -> None:
    assert f"EXTRAS={','.join(EXTRAS)}" in values(dockerfile, "ARG")
    last = last_stage(dockerfile)
    assert values(last, "COPY") == ["--from=build /opt/attnserve /opt/attnserve"]
    (run,) = values(last, "RUN")
    assert run.startswith("useradd ")
    assert not values(dockerfile, "ADD")
    # No dependency is compiled: one without a wheel fails the build.
    assert all(
        "--only-binary :all:" in run or "--no-deps ." in run
        for run in values(dockerfile, "RUN")
        if "pip install" in run
    )


def test_the_compiler_is_where_the_native_kernel_is_built_and_stays_there(dockerfile: list[Instruction]) -> None:
    (compiler,) = [each for each in dockerfile if re.search(r"\b(apt|apt-get|gcc|make)\b", each.rest)]
    build, *_ = (each.stage for each in dockerfile if each.word == "FROM")
    assert (compiler.stage, compiler.word) == (build, "RUN")
    assert re.search(r"install .*\bgcc=\S+ libc6-dev=\S+", compiler.rest)
    before = dockerfile[: next(place for place, each in enumerate(dockerfile) if "--no-deps ." in each.rest)]
    assert compiler in before
    assert any("hatch_build.py" in each.rest for each in before if each.word == "COPY")


def test_it_is_started_as_nobody_in_particular(dockerfile: list[Instruction]) -> None:
    last = last_stage(dockerfile)
    assert values(last, "USER") == ["10001:10001"]  # numeric: Kubernetes cannot tell whether a name is root
    assert "--uid 10001" in values(last, "RUN")[0]
    assert values(last, "ENTRYPOINT") == ['["attnserve-server"]']  # no shell, which would not pass on SIGTERM
    assert values(last, "STOPSIGNAL") == ["SIGTERM"]
    environment = " ".join(values(last, "ENV"))
    assert "PATH=/opt/attnserve/bin:" in environment
    assert "PYTHONDONTWRITEBYTECODE=1" in environment
    config = Config()
    ports = [parse_address(address).port for address in (config.listen, config.http_listen)]
    assert [int(port) for port in values(last, "EXPOSE")[0].split()] == ports


def test_labels_say_which_version_it_is(dockerfile: list[Instruction]) -> None:
    (label,) = values(last_stage(dockerfile), "LABEL")
    names = re.findall(r"org\.opencontainers\.image\.(\w+)=", label)
    assert names == ["title", "description", "version", "revision"]
    assert f"VERSION={__version__}" in values(dockerfile, "ARG")
    tags = {
        image["newTag"]
        for path in DEPLOY.glob("**/kustomization.yaml")
        for image in yaml.safe_load(path.read_text()).get("images", ())
        if "newTag" in image
    }
    assert tags == {f"{__version__}-cpu", f"{__version__}-cuda"}
    assert set(re.findall(r"-t attnserve:(\S+)", DOCKERFILE.read_text())) == tags


def test_everything_copied_is_there_and_not_ignored(dockerfile: list[Instruction]) -> None:
    _, *patterns = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    taken = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    sources = {
        source for rest in values(dockerfile, "COPY") if not rest.startswith("--from") for source in rest.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in sources)
    assert sources == taken


def test_everything_installed_is_pinned() -> None:
    """The requirements of the image's extras, transitive ones included, are pinned in constraints.txt."""
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    needed: set[tuple[str, str]] = set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][extra] for extra in EXTRAS]
    waiting = [("", line) for lines in (project["dependencies"], *extras) for line in lines]
    while waiting:
        wanted_by, line = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted_by}):
            continue
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) not in needed:
                needed.add((name, extra))
                waiting += [(extra, line) for line in metadata.requires(name) or ()]
    assert {name for name, _ in needed} <= pinned
