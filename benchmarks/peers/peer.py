"""A peer: a server of others in a virtual environment of its own, how it is started, and how it is spoken to."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from benchmarks.loads import Load
from benchmarks.plain import Array, Plain, PlainAttention
from benchmarks.servers import Running

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-peers"


class Peer(ABC):
    """A server of others that serves the same functions."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """Whose versions matter."""
    settings: ClassVar[Mapping[str, int]]
    """The settings that were the fastest for it; `tuned` has what differs for some workloads, by name."""
    tuned: ClassVar[Mapping[str, Mapping[str, int]]] = {}
    description: ClassVar[str]
    """What it is, and what of it is used, in words."""
    loads: ClassVar[Mapping[str, Load]]
    """The ways of calling it."""

    @abstractmethod
    def serve(
        self, problem: Plain, settings: Mapping[str, int], weights: Path, directory: Path
    ) -> AbstractContextManager[Running]:
        """Serves what a problem is an example of until the block ends; its own files go into a directory."""

    @abstractmethod
    def output(self, shape: tuple[int, ...], reply: bytes) -> Array:
        """The output of this shape in a reply."""

    def settings_for(self, workload: str) -> dict[str, int]:
        """Its settings for a workload, by its name."""
        return {**self.settings, **self.tuned.get(workload, {})}

    @property
    def environment(self) -> Path:
        """Where `make bench-peers` puts it."""
        return ENVIRONMENTS / self.name.lower()

    @property
    def installed(self) -> bool:
        """Whether it is there, whole."""
        return (self.environment / ".installed").exists()

    @property
    def site_packages(self) -> Path:
        """The packages of its virtual environment."""
        return next((self.environment / "lib").glob("python3.*")) / "site-packages"

    def described(self) -> dict[str, str]:
        """What it is, its versions and its settings, in words."""
        found = {each.name: each.version for each in metadata.distributions(path=[str(self.site_packages)])}
        tuned = {name: _shown(settings) for name, settings in self.tuned.items()}
        return {
            "what": self.description,
            "versions": ", ".join(f"{name} {found[name]}" for name in self.packages),
            "settings": "; ".join((_shown(self.settings), *(f"{name}: {shown}" for name, shown in tuned.items()))),
        }


def _shown(settings: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def model_of(problem: Plain) -> str:
    """The name of the function that a problem is for."""
    return "attention" if isinstance(problem, PlainAttention) else "layer"


def free_ports(count: int) -> list[int]:
    """Ports of this machine that were free a moment ago, for servers that cannot choose one themselves."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
