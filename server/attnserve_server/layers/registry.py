"""The loaded layers by name: loading and unloading them while others run.

A request holds the `Loaded` that it was read for: a layer that is replaced or unloaded lives, with its memory, until
the last of its requests is done. Used on the event loop; files are read on another thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attnserve_server.devices import Device
from attnserve_server.errors import LIMIT_EXCEEDED, FailedPrecondition, NotFound, OutOfMemory
from attnserve_server.layers.build import build_layer
from attnserve_server.layers.checkpoint import load, resolve_file
from attnserve_server.layers.definitions import load_definitions
from attnserve_server.layers.extent import Extents
from attnserve_server.layers.layer import Layer
from attnserve_server.layers.outline import Outline, outline
from attnserve_server.layers.specification import LayerSpecification

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A layer on the device. `version` grows with each load, across all names."""

    layer: Layer
    outline: Outline
    version: int
    extents: Extents

    @property
    def specification(self) -> LayerSpecification:
        """What it is."""
        return self.layer.specification

    @property
    def name(self) -> str:
        """Its name."""
        return self.specification.name


class Registry:
    """The layers of one server. `directory` is the model directory; None if nothing can be loaded. `changed` is called
    with the bytes of all layers by name after each change.
    """

    def __init__(
        self,
        device: Device,
        directory: Path | None,
        changed: Callable[[Mapping[str, int]], None],
        max_layers: int,
    ) -> None:
        self._device = device
        self._changed = changed
        self._directory = directory
        self.max_layers = max_layers
        """The most that may be loaded."""
        self._layers: dict[str, Loaded] = {}
        self._versions = itertools.count(1)
        self._loading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "attnserve-layers")
        self.is_reading = False
        """Whether files are being read, which nothing can interrupt, not even the cancellation of `load`."""

    def get(self, name: str) -> Loaded:
        """A layer by its name. Raises NotFound."""
        loaded = self._layers.get(name)
        if loaded is None:
            raise NotFound("layer", name)
        return loaded

    def all(self) -> list[Loaded]:
        """All layers, by name."""
        return [self._layers[name] for name in sorted(self._layers)]

    async def load(self, definitions: str | Path, names: Collection[str] = ()) -> list[Loaded]:
        """Loads the layers of a file, all or none; layers with the same names are replaced all at once. A `str` is a
        caller's and must be below the model directory; a `Path` is the operator's and is opened as it is.

        Raises LayerError with everything that is wrong, FailedPrecondition if there is no model directory or if there
        would be too many layers, and OutOfMemory, with nothing loaded, if the device does not have the memory.
        """
        directory = self._directory
        if directory is None:
            raise FailedPrecondition("the server has no model directory", "NO_MODEL_DIRECTORY")
        async with self._loading:
            loop = asyncio.get_running_loop()
            try:
                loaded = await loop.run_in_executor(self._thread, self._reading, directory, definitions, names)
            except (RuntimeError, MemoryError) as error:  # torch has no exception class for host memory
                if self._device.blame(error) != "memory":
                    raise
                logger.warning("no memory for the layers", extra={"definitions": definitions, "error": error})
                raise OutOfMemory from None
            self._layers |= {each.name: each for each in loaded}
        self._tell()
        return loaded

    def unload(self, names: Collection[str]) -> None:
        """Unloads layers, all or none. Raises NotFound."""
        for name in names:
            self.get(name)
        for name in set(names):
            del self._layers[name]
        self._tell()

    def close(self) -> None:
        """Ends the thread that reads, without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _tell(self) -> None:
        self._changed({name: each.specification.parameter_bytes() for name, each in self._layers.items()})

    def _reading(self, directory: Path, definitions: str | Path, names: Collection[str]) -> list[Loaded]:
        self.is_reading = True
        try:
            return self._read(directory, definitions, names)
        finally:
            self.is_reading = False

    def _read(self, directory: Path, definitions: str | Path, names: Collection[str]) -> list[Loaded]:
        loaded = []
        path = definitions if isinstance(definitions, Path) else resolve_file(directory, definitions)
        specifications = load_definitions(path, directory, names)
        count = len(self._layers.keys() | {each.name for each in specifications})
        if count > self.max_layers:
            raise FailedPrecondition(
                f"at most {self.max_layers} layers may be loaded (max_layers), and there would be {count}",
                LIMIT_EXCEEDED,
                limit="max_layers",
                loaded=str(len(self._layers)),
            )
        for specification in specifications:
            parameters = load(specification, directory, self._device.torch_device)
            layer = build_layer(specification, parameters, self._device)
            shape = outline(specification)
            loaded.append(Loaded(layer, shape, next(self._versions), Extents(layer, shape)))
        return sorted(loaded, key=lambda each: each.name)
