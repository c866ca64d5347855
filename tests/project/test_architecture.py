"""The code is as docs/architecture.md and docs/modules.md say: every module has a row, and imports only what it may."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"attnserve": ROOT / "client", "attnserve_server": ROOT / "server"}
OF_THE_SDK = {"attnserve._fields", "attnserve._wire", "attnserve._dtypes", "attnserve._version"}
"""What the server may import from the SDK, beside the generated messages."""


class Row(NamedTuple):
    """A module's row: its path, and whether it imports torch, by the cell on that or the heading, if one says so."""

    path: str
    torch: str


@cache
def modules() -> dict[str, Path]:
    """Every module that is not generated, by name; packages too."""
    found = {}
    for package, root in PACKAGES.items():
        for path in (root / package).rglob("*.py"):
            if "v1" not in path.parts:
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


def rows() -> Iterator[Row]:
    """The rows of the tables of modules. In a cell, a name without a folder is in that of the name before."""
    root, columns, of_all = "", 0, ""
    for line in (ROOT / "docs" / "modules.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            found = re.search(r"`((?:client|server)/\S+/)`", line)
            root = found[1] if found else ""
        if line.startswith("#"):
            of_all = "no" if line.endswith(", without torch") else ""
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "module":
            columns = len(cells) if cells[-1] == "imports torch" else 0
        if not root or not line.startswith("| `"):
            continue
        folder = ""
        for name in re.findall(r"`([^`]+)`", cells[0]):
            folder = name.rpartition("/")[0] or folder
            path = Path(root, folder, name.rpartition("/")[2])
            torch = cells[-1] if len(cells) == columns else of_all
            yield Row(str((ROOT / path).resolve().relative_to(ROOT)), torch)


def steps() -> Iterator[str]:
    """The names in the column `where` of the table of a request's steps that are of something in a module."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text[text.index("| | where |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        where = line.split("|")[2]
        yield from (name for name in re.findall(r"`([\w/.]+)`", where) if "." in name)


def is_there(name: str) -> bool:
    """Whether a module has what it is said to have: `folder/module.name` or `folder/module.Class.name`, the folder left
    out where it goes without saying. A method may stand without its class, and a class without its module.
    """
    folder, _, dotted = name.rpartition("/")
    first, *path = dotted.split(".")
    if first[0].isupper():
        path = [first, *path]
        candidates = [found for found, file in modules().items() if f"class {first}" in file.read_text("utf-8")]
    else:
        ending = ".".join(("", *filter(None, folder.split("/")), first))
        candidates = [found for found in modules() if f".{found}".endswith(ending)]
    for found in candidates:
        module = importlib.import_module(found)
        own = [each for each in vars(module).values() if getattr(each, "__module__", None) == found]
        for holder in (module, *(each for each in own if isinstance(each, type))):
            if _has(holder, path):
                return True
    return False


def _has(holder: object, path: list[str]) -> bool:
    nothing = object()
    for name in path:
        holder = getattr(holder, name, nothing)
    return holder is not nothing


def rooms(package: str) -> list[str]:
    """The folders of a package, in the document's order: none imports one above it."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text[text.index(f"/{package}/`\n") :]
    table = section[section.index("| room |") :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)


def imported(path: Path, *, in_functions: bool = False) -> Iterator[str]:
    """What a module imports at import time, and in functions too if `in_functions`; never type-checking imports."""

    def within(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, path
            assert not node.level, path
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else node.module
        for child in ast.iter_child_nodes(node):
            yield from within(child)

    yield from within(ast.parse(path.read_text("utf-8")))


def test_every_module_has_its_row_and_every_row_its_module() -> None:
    named = [row.path for row in rows()]
    assert [name for name, times in Counter(named).items() if times > 1] == []
    assert [name for name in named if not (ROOT / name).exists()] == []
    there = {str(path.relative_to(ROOT)) for path in modules().values() if path.name != "__init__.py"}
    there |= {str(path.relative_to(ROOT)) for path in (ROOT / "server").rglob("*.h")}
    assert there - set(named) == set()


def test_every_step_of_a_request_is_where_it_is_said_to_be() -> None:
    named = list(steps())
    assert len(named) > 20
    assert [name for name in named if not is_there(name)] == []


@pytest.mark.parametrize("name", ["_requests/attend.no", "attend.AttendCall.no", "rpc/attend.AttendCall", "Request.no"])
def test_a_step_that_is_nowhere_is_found_out(name: str) -> None:
    assert is_there("_requests/attend.AttendCall.result")
    assert not is_there(name)


def test_modules_that_docstrings_and_comments_name_are_there() -> None:
    """Beside the module that names them, or in the folder that goes with the name."""
    for name, path in modules().items():
        package = name.partition(".")[0]
        for named in re.findall(r"`([\w/]+\.(?:py|h|c))`", path.read_text("utf-8")):
            assert (path.parent / named).exists() or (PACKAGES[package] / package / named).exists(), f"{name}: {named}"


def test_only_what_computes_imports_torch() -> None:
    """Code that decides without torch is importable without it: policy is separate from execution."""
    names = {str(path.relative_to(ROOT)): name for name, path in modules().items()}
    light = [names[row.path] for row in rows() if row.torch == "no"]
    assert len(light) > 50
    program = "import sys\n" + "".join(
        f"import {name}\nassert 'torch' not in sys.modules, '{name} imports torch'\n" for name in light
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_sdk_knows_nothing_of_the_server_and_the_server_little_of_the_sdk() -> None:
    for name, path in modules().items():
        found = [each for each in imported(path) if each.partition(".")[0] in PACKAGES]
        if name.partition(".")[0] == "attnserve":
            assert [each for each in found if each.startswith("attnserve_server")] == [], name
        else:
            of_the_sdk = {each for each in found if not each.startswith("attnserve_server")}
            others = {each for each in of_the_sdk if not each.startswith("attnserve.v1")} - OF_THE_SDK
            assert others == set(), name


def test_no_module_imports_one_that_imports_it() -> None:
    left = {name: set(imported(path)) & modules().keys() - {name} for name, path in modules().items()}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert left == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_imports_one_above_it(package: str) -> None:
    """Nor a module outside the rooms that itself depends on a room above it or on the same room."""
    root, order = PACKAGES[package] / package, rooms(package)
    places = {name: path.relative_to(root).parts for name, path in modules().items() if path.is_relative_to(root)}
    room_of = {name: parts[0] for name, parts in places.items() if len(parts) > 1}
    assert set(order) == set(room_of.values())
    needs = {name: places.keys() & set(imported(modules()[name], in_functions=True)) for name in places}

    def put_together_of(name: str, seen: set[str]) -> set[str]:
        seen.add(name)
        beside = needs[name] - room_of.keys() - seen
        return {room_of[each] for each in needs[name] & room_of.keys()}.union(
            *(put_together_of(each, seen) for each in beside)
        )

    for name, room in room_of.items():
        above = set(order[: order.index(room)])
        assert {room_of[each] for each in needs[name] & room_of.keys()} & above == set(), name
        for beside in needs[name] - room_of.keys():
            assert put_together_of(beside, set()) & (above | {room}) == set(), (name, beside)
