"""The layers that a server holds: what they are, and listing, loading and unloading them.

In: names, and definition files on the server. Out: `Layer`, plain frozen values. `Layers` and `AsyncLayers` are the
`layers` of the two clients, and behave alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from attnserve import _dtypes
from attnserve._errors import AttnServeError, InvalidRequestError, NotFoundError, ProtocolError
from attnserve._requests import arguments
from attnserve._requests.arguments import Names
from attnserve._rpc import Rpc
from attnserve._settings.config import Timeout
from attnserve.v1 import layers_pb2 as pb

if TYPE_CHECKING:
    from attnserve import _task_calls as task_calls
    from attnserve import _thread_calls as thread_calls

T = TypeVar("T")

_SERVICE: Final = "/attnserve.v1.LayerService/"

LOAD_TIMEOUT: Final = 600.0
"""The default timeout of `load`, in seconds. It has one of its own because it may read gigabytes."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that a server holds.

    - `name`: its name.
    - `kind`: its kind: ``multi_head``, ``single_head``, ``additive``, ``general`` or ``transformer``.
    - `dtype`: the dtype of its parameters on the device, such as ``float32``.
    - `parameters`: how many parameters it has.
    - `bytes`: the bytes that they take on the device.
    - `version`: the layer's version: a number that grows with each load of a layer, across all names.
    - `input_width`: the width of its input; None if it takes token ids.
    - `context_width`: the width of its context; None if it takes none.
    - `output_width`: the width of its output.
    - `num_query_heads`: its query heads; 1 if it has no heads.
    - `num_kv_heads`: its key/value heads; 1 if it has no heads.
    - `head_dim`: the width of each of its query heads (of the hidden units, for additive scores).
    - `blocks`: its blocks, for a transformer; None for others.
    - `vocabulary`: the size of its vocabulary; None if it takes activations.
    - `causal`: whether it is causal by its definition.
    - `value_dim`: the width of each of its value heads (of the values, for learned scores). A cache for a decoder needs
      it, too.
    - `positions`: how many positions have an embedding, if these are learned: a sequence may have so many tokens, those
      in its cache included; None if there is no bound.
    """

    name: str
    kind: str
    dtype: str
    parameters: int
    bytes: int
    version: int
    input_width: int | None
    context_width: int | None
    output_width: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    blocks: int | None
    vocabulary: int | None
    causal: bool
    value_dim: int
    positions: int | None


class Layers:
    """The layers of a server: `Client.layers`.

    A client that knows several servers loads and unloads on each of them, one after the other, whatever they answer. If
    any fails, the error that is raised at the end says which ones, and why. It is safe to load again. `list` and `get`
    ask any one server. Behind a load balancer, each method reaches one server, of the balancer's choice: to load
    everywhere, use a client that knows all addresses.

    `timeout` is in seconds for each server, None for no limit; by default it is the client's, but 600 s for `load`.
    Each method raises an `AttnServeError`. Loading and unloading are not retried: after an `UnavailableError`, `list`
    of a client of that server alone shows the outcome.
    """

    def __init__(self, calls: thread_calls.Calls) -> None:
        self._calls = calls

    def list(self, *, timeout: Timeout = ...) -> tuple[Layer, ...]:
        """All loaded layers, by name."""
        return self._calls.ask(_listing(), timeout)

    def get(self, name: str, *, timeout: Timeout = ...) -> Layer:
        """One layer. `NotFoundError` if none has that name."""
        return self._calls.ask(_getting(name), timeout)

    def load(
        self, definitions: str, names: Names | None = None, *, timeout: Timeout = LOAD_TIMEOUT
    ) -> tuple[Layer, ...]:
        """Loads layers, all or none, and returns them by name. If a name is taken, the new layer replaces the old one
        at once. Caches that the old one has appended to stay as they are; callers notice by
        `LayerResult.layer_version`. Of several servers, the first describes the layers; each counts versions of its
        own.

        `definitions` is a file below the server's model directory, such as ``layers.toml``; `names` says which of its
        layers to load, one or several; None, the default, stands for all. `InvalidRequestError` says what is wrong with
        a definition or its weights, `NotFoundError` that there is no such file, `OverloadedError` that there is no
        memory for it, `FailedPreconditionError` that the server has no model directory, or would have too many layers,
        and `PermissionDeniedError` that callers may not load layers.
        """
        return self._everywhere(_loading(definitions, names), timeout)

    def unload(self, names: Names, *, timeout: Timeout = ...) -> None:
        """Unloads layers, all or none. Calls in flight are still answered. `NotFoundError` if a name is unknown. With
        several servers, that error means that nothing else failed: if it was one name, no server has it any more.
        """
        self._everywhere(_unloading(names), timeout)

    def _everywhere(self, rpc: Rpc[Any, T], timeout: Timeout) -> T:
        answers: _Answers[T] = _Answers()
        for home in self._calls.servers.homes(self._calls.seconds(timeout)):
            with answers.of(home):
                answers.add(self._calls.ask(rpc, timeout, home))
        return answers.first()


class AsyncLayers:
    """The layers of a server: `AsyncClient.layers`. Everything is as with `Layers`, awaited."""

    def __init__(self, calls: task_calls.Calls) -> None:
        self._calls = calls

    async def list(self, *, timeout: Timeout = ...) -> tuple[Layer, ...]:
        """All loaded layers, by name."""
        return await self._calls.ask(_listing(), timeout)

    async def get(self, name: str, *, timeout: Timeout = ...) -> Layer:
        """One layer. `NotFoundError` if none has that name."""
        return await self._calls.ask(_getting(name), timeout)

    async def load(
        self, definitions: str, names: Names | None = None, *, timeout: Timeout = LOAD_TIMEOUT
    ) -> tuple[Layer, ...]:
        """Loads layers on all servers, on each all or none, and returns them by name, as `Layers.load` does."""
        return await self._everywhere(_loading(definitions, names), timeout)

    async def unload(self, names: Names, *, timeout: Timeout = ...) -> None:
        """Unloads layers on all servers, on each all or none, as `Layers.unload` does."""
        await self._everywhere(_unloading(names), timeout)

    async def _everywhere(self, rpc: Rpc[Any, T], timeout: Timeout) -> T:
        answers: _Answers[T] = _Answers()
        for home in await self._calls.servers.homes_soon(self._calls.seconds(timeout)):
            with answers.of(home):
                answers.add(await self._calls.ask(rpc, timeout, home))
        return answers.first()


class _Answers(Generic[T]):
    """What each of a client's servers answers to the same question: no I/O."""

    def __init__(self) -> None:
        self._answers: list[T] = []
        self._failures: list[tuple[str, AttnServeError]] = []

    def add(self, answer: T) -> None:
        """Notes what a server has answered."""
        self._answers.append(answer)

    @contextmanager
    def of(self, home: str | None) -> Iterator[None]:
        """A context in which the server at an address is asked. Its error is left for `first` to raise, unless there is
        one address only.
        """
        try:
            yield
        except AttnServeError as error:
            if home is None:
                raise
            self._failures.append((home, error))

    def first(self) -> T:
        """The first answer. If there are errors, it raises one whose message has them all: the first other than
        `NotFoundError`, which may only mean that a server has already done what it is asked for again.
        """
        if not self._failures:
            return self._answers[0]
        homes: dict[str, list[str]] = {}
        for home, error in self._failures:
            homes.setdefault(str(error), []).append(home)
        errors = [error for _, error in self._failures]
        worst = next((error for error in errors if not isinstance(error, NotFoundError)), errors[0])
        raised = copy(worst)
        raised.args = ("; ".join(f"{', '.join(those)}: {message}" for message, those in homes.items()),)
        raise raised from worst


def _listing() -> Rpc[pb.LayerServiceListResponse, tuple[Layer, ...]]:
    return Rpc(_SERVICE + "List", pb.LayerServiceListRequest(), pb.LayerServiceListResponse, _layers)


def _getting(name: str) -> Rpc[pb.LayerServiceGetResponse, Layer]:
    request = pb.LayerServiceGetRequest(name=arguments.text("name", name))
    return Rpc(_SERVICE + "Get", request, pb.LayerServiceGetResponse, _only_layer)


def _loading(definitions: str, names: Names | None) -> Rpc[pb.LayerServiceLoadResponse, tuple[Layer, ...]]:
    chosen = [] if names is None else arguments.names("names", names)
    if names is not None and not chosen:  # to the server, no names stand for all
        raise InvalidRequestError("names: expected a name or several, or None for all, found none", field="names")
    request = pb.LayerServiceLoadRequest(definitions=arguments.text("definitions", definitions), names=chosen)
    return Rpc(_SERVICE + "Load", request, pb.LayerServiceLoadResponse, _layers, repeatable=False)


def _unloading(names: Names) -> Rpc[pb.LayerServiceUnloadResponse, None]:
    request = pb.LayerServiceUnloadRequest(names=arguments.names("names", names))
    return Rpc(_SERVICE + "Unload", request, pb.LayerServiceUnloadResponse, lambda response: None, repeatable=False)


def _layers(response: pb.LayerServiceListResponse | pb.LayerServiceLoadResponse) -> tuple[Layer, ...]:
    return tuple(map(_layer, response.layers))


def _only_layer(response: pb.LayerServiceGetResponse) -> Layer:
    if not response.HasField("layer"):
        raise ProtocolError("the server was asked for a layer and replied without one")
    return _layer(response.layer)


def _layer(layer: pb.Layer) -> Layer:
    return Layer(
        name=layer.name,
        kind=layer.kind,
        dtype=_dtypes.name(layer.dtype),
        parameters=layer.parameters,
        bytes=layer.bytes,
        version=layer.version,
        input_width=layer.input_width or None,
        context_width=layer.context_width or None,
        output_width=layer.output_width,
        num_query_heads=layer.num_query_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        blocks=layer.blocks or None,
        vocabulary=layer.vocabulary or None,
        causal=layer.causal,
        value_dim=layer.value_dim,
        positions=layer.positions or None,
    )
