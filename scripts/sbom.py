"""The server's software bill of materials (CycloneDX, JSON).

    python scripts/sbom.py build/sbom.json

In: the packages of the Python that runs this, pyproject.toml. Out: a file with the direct and transitive dependencies
of `attnserve[server]`, their versions and licences, and which needs which. cyclonedx-bom describes everything that is
installed; what only tests and tools need is left out here.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRA = "server"


def installed() -> dict[str, Any]:
    """cyclonedx-bom's description of all installed packages."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--no-validate"]
    with TemporaryDirectory() as directory:
        file = Path(directory) / "environment.json"
        project = ["--pyproject", str(ROOT / "pyproject.toml"), "-o", str(file), sys.executable]
        subprocess.run([*command, *project], check=True)
        document: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return document


def needs(requirements: Iterable[Requirement], extras: Iterable[str] = ("",)) -> dict[str, set[str]]:
    """The names of the required packages, with their extras; requirements for other platforms are left out."""
    wanted: dict[str, set[str]] = {}
    for each in requirements:
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
            wanted.setdefault(canonicalize_name(each.name), {""}).update(each.extras)
    return wanted


def closure(direct: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The requirements of each of these packages and of all that they need. PackageNotFoundError if one is missing."""
    graph: dict[str, set[str]] = {}
    waiting = list(direct.items())
    while waiting:
        name, extras = waiting.pop()
        wanted = needs(map(Requirement, metadata.requires(name) or ()), extras)
        known = graph.setdefault(name, set())
        waiting += [(each, wanted[each]) for each in wanted.keys() - known]
        known.update(wanted)
    return graph


def reduced(document: dict[str, Any]) -> dict[str, Any]:
    """The document, reduced to the packages that serving needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    direct = needs(map(Requirement, (*project["dependencies"], *project["optional-dependencies"][EXTRA])))
    graph = closure(direct)
    references: dict[str, Any] = {canonicalize_name(each["name"]): each["bom-ref"] for each in document["components"]}
    main = document["metadata"]["component"]
    main["version"] = runpy.run_path(str(ROOT / "client" / "attnserve" / "_version.py"))["__version__"]
    document["components"] = [each for each in document["components"] if canonicalize_name(each["name"]) in graph]
    document["dependencies"] = [
        {"ref": reference, "dependsOn": sorted(references[name] for name in names)}
        for reference, names in [
            (main["bom-ref"], direct.keys()),
            *((references[name], graph[name]) for name in sorted(graph)),
        ]
    ]
    return document


def unpinned(document: dict[str, Any]) -> list[str]:
    """The packages whose version is not the one in constraints.txt."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    return [
        f"{each['name']} {each['version']}"
        for each in document["components"]
        # A build for other processors or devices (torch 2.13.0+cpu) is the same version.
        if pins.get(canonicalize_name(each["name"])) != each["version"].partition("+")[0]
    ]


def main() -> int:
    """Writes the file named on the command line; returns 1 if it is not valid CycloneDX, or versions are not the pinned
    ones.
    """
    document = reduced(installed())
    text = json.dumps(document, indent=2) + "\n"
    if (
        flaw := JsonStrictValidator(SchemaVersion.from_version(document["specVersion"])).validate_str(text)
    ) is not None:
        print(f"not CycloneDX: {flaw}", file=sys.stderr)
        return 1
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    print(f"{file}: {len(document['components'])} packages")
    if others := unpinned(document):
        print(f"not as constraints.txt pins them: {', '.join(others)}", file=sys.stderr)
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
