"""What callers see of the SDK's objects: what is documented, and nothing of how it works."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest
from typing_extensions import TypeVar

import attnserve
from attnserve import (
    AsyncCache,
    AsyncCaches,
    AsyncClient,
    AsyncLayers,
    Cache,
    CacheInfo,
    Caches,
    Client,
    Layer,
    Layers,
    Limits,
    ServerInfo,
)
from attnserve.v1 import attention_pb2, caches_pb2, layers_pb2

INFO: Final = CacheInfo("cache", 2, 3, 4, 2, "float32", (5, 6), 0, 0, 7.0, 6.0, alias="mine")

FACTS: Final = {
    "name": "cache",
    "num_kv_heads": 2,
    "head_dim": 3,
    "value_dim": 4,
    "layers": 2,
    "dtype": "float32",
    "ttl": 7.0,
    "address": "host:1",
    "alias": "mine",
    "length": 5,
    "lengths": (5, 6),
}
"""What a cache tells without asking its server."""

OPERATIONS: Final = {"append", "attend", "delete", "fork", "info", "refresh", "truncate"}


def public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


@pytest.mark.parametrize(("client_class", "cache_class"), [(Client, Cache), (AsyncClient, AsyncCache)])
def test_a_cache_shows_what_it_is_and_cannot_be_changed(client_class: Any, cache_class: Any) -> None:
    cache = cache_class(client_class("host:1"), INFO, "host:1")
    asks = {"bytes"} if cache_class is Cache else set()
    assert public(cache) == set(FACTS) | OPERATIONS | asks
    assert {name: getattr(cache, name) for name in FACTS} == FACTS
    for name in FACTS:
        assert inspect.getdoc(getattr(cache_class, name)), name
        with pytest.raises(AttributeError):
            setattr(cache, name, None)


def signatures() -> Iterator[Any]:
    """The functions that callers call, with what their annotations are made of."""
    yield attnserve.merge_attention
    for name in attnserve.__all__:
        if isinstance(value := getattr(attnserve, name), type):
            yield from (method for each in public(value) if inspect.isfunction(method := getattr(value, each)))
    yield from (each.__init__ for each in (Client, AsyncClient, attnserve.TLS, attnserve.Token))


def test_what_types_signatures_name_can_be_imported() -> None:
    """Those of Python and of other packages apart."""
    unknown = set()
    for function in signatures():
        for annotation in function.__annotations__.values():
            for name in re.findall(r"(?<![\w.'])[A-Z]\w*", str(annotation)):
                value = inspect.unwrap(function).__globals__.get(name)
                ours = not isinstance(value, type) or value.__module__.startswith("attnserve.")
                if ours and value is not None and not hasattr(typing, name) and not isinstance(value, TypeVar):
                    unknown.add(name)
    assert unknown - set(attnserve.__all__) == set()


def test_the_caches_and_layers_of_a_server() -> None:
    for kind in (Caches, AsyncCaches):
        assert public(kind) == {"delete", "fork", "get", "list", "pool", "truncate"}
    for kind in (Layers, AsyncLayers):
        assert public(kind) == {"get", "list", "load", "unload"}


@pytest.mark.parametrize(
    ("message", "value"),
    [
        (attention_pb2.ServerInfoResponse, ServerInfo),
        (attention_pb2.Limits, Limits),
        (layers_pb2.Layer, Layer),
        (caches_pb2.Cache, CacheInfo),
    ],
)
def test_whatever_a_server_tells_reaches_the_caller(message: Any, value: Any) -> None:
    assert {field.name for field in dataclasses.fields(value)} == set(message.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(("client_class", "cache_class"), [(Client, Cache), (AsyncClient, AsyncCache)])
def test_a_client_says_of_which_kind_its_caches_are(client_class: Any, cache_class: Any) -> None:
    for name in ("attend", "submit", "apply", "submit_apply"):
        hints = typing.get_type_hints(getattr(client_class, name))
        assert hints["caches"] == cache_class | Iterable[cache_class] | None
        assert hints.get("cache") in (None, cache_class | None)


VALUES: Final = {
    name: members
    for name in attnserve.__all__
    if isinstance(value := getattr(attnserve, name), type)
    and (members := getattr(value, "__match_args__", getattr(value, "_fields", ())))
} | {"AttnServeError": ("code", "details", "resent"), "InvalidRequestError": ("field", "limit")}
"""What results, other values and errors have, by class."""


@pytest.mark.parametrize("name", VALUES)
def test_help_says_what_a_value_has(name: str) -> None:
    """Not in strings behind the assignments, which nobody but the readers of the source sees."""
    shown = pydoc.render_doc(getattr(attnserve, name), renderer=pydoc.plaintext)
    for member in VALUES[name]:
        assert f"- `{member}`: " in shown


def test_values_have_nothing_but_what_they_hold() -> None:
    values = [getattr(attnserve, name) for name in VALUES]
    for value in filter(dataclasses.is_dataclass, values):
        assert public(value) <= {field.name for field in dataclasses.fields(value)}, value


def test_errors_have_the_attributes_that_help_lists() -> None:
    assert public(attnserve.AttnServeError) - public(Exception) == {"reason", "request_id"}
    assert vars(attnserve.AttnServeError("text")).keys() == set(VALUES["AttnServeError"])
    more = {*VALUES["AttnServeError"], *VALUES["InvalidRequestError"]}
    assert vars(attnserve.InvalidRequestError("text")).keys() == more


@pytest.mark.parametrize(
    ("plain", "for_asyncio"),
    [(Client, AsyncClient), (Cache, AsyncCache), (Caches, AsyncCaches), (Layers, AsyncLayers)],
)
def test_the_surface_for_asyncio_is_that_for_threads(plain: Any, for_asyncio: Any) -> None:
    """The same methods, whose arguments have the same names, order and defaults."""
    asks = {"bytes"} if plain is Cache else set()
    assert public(plain) == public(for_asyncio) | asks
    for name in ["__init__", *sorted(public(for_asyncio))]:
        if callable(method := getattr(plain, name)):
            ours, theirs = (
                inspect.signature(each).parameters.values() for each in (method, getattr(for_asyncio, name))
            )
            facts = [[(each.name, each.kind, each.default) for each in parameters] for parameters in (ours, theirs)]
            assert facts[0] == facts[1], name
