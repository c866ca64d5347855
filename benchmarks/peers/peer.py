"""A peer: another server in a virtual environment of its own, how it is started, and how it is called."""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Final

from attnserve_server.host import allocator
from benchmarks.loads import Load
from benchmarks.plain import Array, Plain, PlainAttention
from benchmarks.servers import Running

ENVIRONMENTS: Final = Path(__file__).parents[2] / ".venv-peers"
SETTINGS: Final = Path(__file__).with_name("settings.json")
"""The fastest settings of each peer for each workload, as found by `tune.py`, and where and when that was."""

TUNED: Final = "tuned"
"""The key of where and when, by peer."""

KEEPING_MEMORY: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(allocator.LARGEST_OF_A_HEAP),
    "MALLOC_TRIM_THRESHOLD_": str(allocator.KEPT),
}
"""Variables by which a process keeps the memory that it has freed, as the service does."""


class Peer(ABC):
    """Another server that serves the same functions."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """The packages whose versions matter."""
    settings: ClassVar[Mapping[str, int]]
    """The settings of workloads for which no faster ones were found."""
    description: ClassVar[str]
    """What it is, and which parts are used, in words."""
    loads: ClassVar[Mapping[str, Load]]
    """The ways of calling it."""

    @abstractmethod
    def serve(
        self, problem: Plain, settings: Mapping[str, int], weights: Path, directory: Path
    ) -> AbstractContextManager[Running]:
        """Serves the function that a problem is an example of, until the block ends; its files go into a directory."""

    @abstractmethod
    def output(self, shape: tuple[int, ...], reply: bytes) -> Array:
        """The output in a reply; `shape` is the expected one."""

    def settings_for(self, workload: str) -> dict[str, int]:
        """Its fastest settings for a workload, given by name."""
        found: dict[str, dict[str, int]] = json.loads(SETTINGS.read_text("utf-8")).get(self.name, {})
        return {**self.settings, **found.get(workload, {})}

    @property
    def environment(self) -> Path:
        """The directory into which `make bench-peers` installs it."""
        return ENVIRONMENTS / self.name.lower()

    @property
    def installed(self) -> bool:
        """Whether it is completely installed."""
        return (self.environment / ".installed").exists()

    @property
    def site_packages(self) -> Path:
        """The packages of its virtual environment."""
        return next((self.environment / "lib").glob("python3.*")) / "site-packages"

    def described(self, workloads: Iterable[str]) -> dict[str, str]:
        """What it is, its versions and its settings for workloads, in words."""
        found = {each.name: each.version for each in metadata.distributions(path=[str(self.site_packages)])}
        named: dict[str, list[str]] = {}
        for workload in workloads:
            settings = ", ".join(f"{name} {value}" for name, value in self.settings_for(workload).items())
            named.setdefault(settings, []).append(workload)
        return {
            "what": self.description,
            "versions": ", ".join(f"{name} {found[name]}" for name in self.packages),
            "settings": "; ".join(f"{', '.join(names)}: {settings}" for settings, names in named.items()),
            "tuned": json.loads(SETTINGS.read_text("utf-8"))[TUNED][self.name],
        }


def model_of(problem: Plain) -> str:
    """The name of the function that a problem is for."""
    return "attention" if isinstance(problem, PlainAttention) else "layer"


def free_ports(count: int) -> list[int]:
    """Ports on this machine that were free a moment ago, for servers that cannot choose one themselves."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
