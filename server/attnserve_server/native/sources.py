"""What the native kernel is compiled from and how, and the digest of both that a library carries.

In: the directory of the sources. Out: arguments for a compiler, and whether a library was compiled from exactly these.
Imports nothing that only an installed package has: the package build reads this file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

UNITS: Final = (
    "amx.c", "attention.c", "attend_avx2.c", "attend_avx512.c", "messages.c", "rotations.c", "team.c", "tokens.c",
)  # fmt: skip
"""What is compiled; these include all other sources."""

# Multiplications and additions are fused only where the sources say so: bits do not depend on the compiler's choice.
FLAGS: Final = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra")


def command(directory: Path, out: Path, flags: tuple[str, ...] = FLAGS) -> list[str]:
    """The arguments of a C compiler that make the library."""
    units = (str(directory / unit) for unit in UNITS)
    return [*flags, f'-DSOURCES="{digest(directory)}"', "-o", str(out), *units, "-lm"]


def present(directory: Path) -> bool:
    """Whether the sources are here: they are in a checkout, but not where the package was installed from a wheel."""
    return (directory / UNITS[0]).exists()


def digest(directory: Path) -> str:
    """The digest of the names and contents of all sources, and of the flags; dates and paths do not count."""
    found = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(directory.glob("*.[ch]")):
        content = path.read_bytes()
        found.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def made(library: Path) -> bool:
    """Whether a library was compiled from the sources that lie beside it."""
    return digest(library.parent).encode() in library.read_bytes()
