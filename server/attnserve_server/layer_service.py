"""The RPCs of `LayerService`: what is loaded, loading and unloading."""

from __future__ import annotations

import logging
from typing import Any

from grpc import aio

from attnserve.v1 import layers_pb2 as pb
from attnserve.v1 import layers_pb2_grpc
from attnserve_server.errors import MAX_SHOWN, ComputationFailed, InvalidRequest, NotFound, RequestError
from attnserve_server.layers.errors import LayerError, NoSuchFileError
from attnserve_server.layers.registry import Loaded, Registry
from attnserve_server.service import abort

logger = logging.getLogger(__name__)

LAYER_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["LayerService"].full_name

Context = aio.ServicerContext[Any, Any]


class LayerService:
    """The service on one registry. RPCs bear the names that gRPC gives them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def register(self, server: aio.Server) -> None:
        """Adds the service to a gRPC server that has not started."""
        layers_pb2_grpc.add_LayerServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def List(self, request: pb.LayerServiceListRequest, context: Context) -> pb.LayerServiceListResponse:  # noqa: N802
        """All layers."""
        return pb.LayerServiceListResponse(layers=map(_message, self._registry.all()))

    async def Get(self, request: pb.LayerServiceGetRequest, context: Context) -> pb.LayerServiceGetResponse:  # noqa: N802
        """One layer."""
        try:
            return pb.LayerServiceGetResponse(layer=_message(self._registry.get(request.name)))
        except RequestError as error:
            return await abort(context, error)

    async def Load(self, request: pb.LayerServiceLoadRequest, context: Context) -> pb.LayerServiceLoadResponse:  # noqa: N802
        """Loads layers from definitions below the model directory."""
        try:
            if not request.definitions:
                raise InvalidRequest("definitions", "a file below the model directory", "nothing")
            loaded = await self._registry.load(request.definitions, list(request.names))
        except NoSuchFileError as error:
            logger.warning("layers were not loaded", extra={"definitions": request.definitions, "error": error})
            return await abort(context, NotFound("file", request.definitions))
        except LayerError as error:
            logger.warning("layers were not loaded", extra={"definitions": request.definitions, "error": error})
            return await abort(context, InvalidRequest("definitions", "layers that can be loaded", _summary(error)))
        except RequestError as error:
            return await abort(context, error)
        except Exception:  # no memory, most likely; what gRPC would tell the caller of it is not for callers
            logger.exception("layers were not loaded", extra={"definitions": request.definitions})
            return await abort(context, ComputationFailed("the layers could not be brought to the device"))
        logger.info("loaded %s", ", ".join(each.name for each in loaded))
        return pb.LayerServiceLoadResponse(layers=map(_message, loaded))

    async def Unload(  # noqa: N802
        self, request: pb.LayerServiceUnloadRequest, context: Context
    ) -> pb.LayerServiceUnloadResponse:
        """Unloads layers."""
        try:
            if not request.names:
                raise InvalidRequest("names", "at least one name", "none")
            self._registry.unload(request.names)
        except RequestError as error:
            return await abort(context, error)
        logger.info("unloaded %s", ", ".join(request.names))
        return pb.LayerServiceUnloadResponse()


def _summary(error: LayerError) -> str:
    """The first defects, as many as a status has room for; the log has all."""
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
        query_heads=outline.query_heads,
        kv_heads=outline.kv_heads,
        head_dim=outline.head_dim,
        blocks=outline.blocks,
        vocabulary=outline.vocabulary,
        causal=outline.causal,
    )
