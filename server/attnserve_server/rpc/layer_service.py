"""The RPCs of `LayerService`: listing, loading and unloading layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import grpc
from grpc import aio

from attnserve.v1 import layers_pb2 as pb
from attnserve_server.access.callers import Caller
from attnserve_server.errors import (
    LIMIT_EXCEEDED,
    MAX_SHOWN,
    MOST_NAME_SHOWN,
    ComputationFailed,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RequestError,
)
from attnserve_server.host.allocator import UnusedMemory
from attnserve_server.layers.errors import LayerError, NoSuchFileError, NoSuchLayerError
from attnserve_server.layers.registry import Loaded, Registry
from attnserve_server.rpc.rpcs import Rpcs

logger = logging.getLogger(__name__)

LAYER_SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["LayerService"].full_name


class LayerService:
    """The service for one registry. Without `administration`, no caller can load or unload layers."""

    def __init__(
        self,
        registry: Registry,
        rpcs: Rpcs,
        check_open: Callable[[], None],
        unused_memory: UnusedMemory,
        *,
        administration: bool,
    ) -> None:
        """`check_open` raises what new work gets from a server that takes none."""
        self._registry = registry
        self._unused_memory = unused_memory
        self._rpcs = rpcs
        self._check_open = check_open
        self._administration = administration

    def register(self, server: aio.Server) -> None:
        """Adds the service to a gRPC server that has not started."""
        answering = self._rpcs.answering
        handlers = {
            "List": answering("list_layers", pb.LayerServiceListRequest, self._list, "use", "layers"),
            "Get": answering("get_layer", pb.LayerServiceGetRequest, self._get, "use", "layers"),
            "Load": answering("load_layers", pb.LayerServiceLoadRequest, self._load, "layers"),
            "Unload": answering("unload_layers", pb.LayerServiceUnloadRequest, self._unload, "layers"),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(LAYER_SERVICE_NAME, handlers),))

    def _list(self, caller: Caller, request: pb.LayerServiceListRequest) -> pb.LayerServiceListResponse:
        return pb.LayerServiceListResponse(layers=map(_message, self._registry.all()))

    def _get(self, caller: Caller, request: pb.LayerServiceGetRequest) -> pb.LayerServiceGetResponse:
        if not request.name:
            raise InvalidRequest("name", "the name of a layer", "nothing")
        return pb.LayerServiceGetResponse(layer=_message(self._registry.get(request.name)))

    async def _load(self, caller: Caller, request: pb.LayerServiceLoadRequest) -> pb.LayerServiceLoadResponse:
        self._check_administration()
        self._check_open()
        if not request.definitions:
            raise InvalidRequest("definitions", "a file below the model directory", "nothing")
        self._check_names(request.names)
        file = request.definitions[:MOST_NAME_SHOWN]
        try:
            loaded = await self._registry.load(request.definitions, list(request.names))
        except NoSuchFileError as error:
            logger.warning("layers were not loaded", extra={"definitions": file, "error": error})
            raise NotFound("file", request.definitions) from None
        except NoSuchLayerError as error:
            logger.warning("layers were not loaded", extra={"definitions": file, "error": error})
            found = ", ".join(repr(each.layer) for each in error.defects)
            raise InvalidRequest("names", f"names of layers in {error.defects[0].file}", found) from None
        except LayerError as error:
            logger.warning("layers were not loaded", extra={"definitions": file, "error": error})
            raise InvalidRequest("definitions", "layers that can be loaded", _summary(error)) from None
        except RequestError:
            raise
        except Exception:  # a fault of the server: only the log says which
            logger.exception("layers were not loaded", extra={"definitions": file})
            raise ComputationFailed("the layers could not be loaded") from None
        logger.info("loaded %s", ", ".join(each.name for each in loaded))
        self._unused_memory.let_go()  # that of the layers that were replaced
        return pb.LayerServiceLoadResponse(layers=map(_message, loaded))

    def _unload(self, caller: Caller, request: pb.LayerServiceUnloadRequest) -> pb.LayerServiceUnloadResponse:
        self._check_administration()
        if not request.names:
            raise InvalidRequest("names", "at least one name", "none")
        self._check_names(request.names)
        self._registry.unload(request.names)
        self._unused_memory.let_go()
        logger.info("unloaded %s", ", ".join(request.names))
        return pb.LayerServiceUnloadResponse()

    def _check_administration(self) -> None:
        if not self._administration:
            reason = "the server's setting layer_administration is false"
            raise PermissionDenied(f"no caller may load and unload layers here: {reason}", "NO_ADMINISTRATION")

    def _check_names(self, names: Sequence[str]) -> None:
        if len(names) > self._registry.max_layers:
            expected = f"at most {self._registry.max_layers} names"
            raise InvalidRequest("names", expected, len(names), LIMIT_EXCEEDED, limit="max_layers")


def _summary(error: LayerError) -> str:
    """The first defects, as many as a status has room for; the log has all of them."""
    lines: list[str] = []
    room = MAX_SHOWN - 100  # for the words around them
    for line in map(str, error.defects):
        room -= len(line)
        if lines and room < 0:
            break
        lines.append(line)
    more = len(error.defects) - len(lines)
    return "\n".join([*lines, *[f"and {more} more"] * bool(more)])


def _message(loaded: Loaded) -> pb.Layer:
    specification, outline = loaded.specification, loaded.outline
    return pb.Layer(
        name=loaded.name,
        kind=specification.kind,
        dtype=f"DATA_TYPE_{specification.dtype.upper()}",
        parameters=specification.parameter_count(),
        bytes=specification.parameter_bytes(),
        version=loaded.version,
        input_width=outline.input_width,
        context_width=outline.context_width,
        output_width=outline.output_width,
        num_query_heads=outline.num_query_heads,
        num_kv_heads=outline.num_kv_heads,
        head_dim=outline.head_dim,
        blocks=outline.blocks,
        vocabulary=outline.vocabulary,
        causal=outline.causal,
        value_dim=outline.value_dim,
        positions=outline.positions,
    )
