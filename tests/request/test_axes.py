"""Queries, keys and values against resident ones: which shapes fit, and what the error says if they do not."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import pytest

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.axes import KeyShape
from attnserve_server.requests.problem import Problem, problem_of

RESIDENT = KeyShape(kv_heads=2, key_dim=8, value_dim=6)


def problem(
    query: tuple[int, ...],
    key: tuple[int, ...] | None = None,
    value: tuple[int, ...] | None = None,
    resident: KeyShape = RESIDENT,
    **fields: Any,
) -> Problem:
    """The problem that a request with tensors of these shapes poses to resident keys."""
    shapes = {"query": query, "key": key, "value": value}
    tensors = {name: messages.tensor(np.zeros(shape, np.float32)) for name, shape in shapes.items() if shape}
    buffer = pb.AttendRequest(**tensors, **fields).SerializeToString()
    header, _ = _wire.find(pb.AttendRequest, buffer, 0, len(buffer))
    return problem_of(header, resident)


@pytest.mark.parametrize(
    ("query", "layout", "resident", "batch", "heads", "length"),
    [
        ((3, 4, 5, 8), pb.LAYOUT_UNSPECIFIED, RESIDENT, 3, 4, 5),
        ((3, 5, 4, 8), pb.LAYOUT_LENGTH_FIRST, RESIDENT, 3, 4, 5),
        ((4, 5, 8), pb.LAYOUT_HEADS_FIRST, RESIDENT, 1, 4, 5),
        ((5, 4, 8), pb.LAYOUT_LENGTH_FIRST, RESIDENT, 1, 4, 5),
        ((5, 8), pb.LAYOUT_HEADS_FIRST, RESIDENT._replace(kv_heads=1), 1, 1, 5),
    ],
)
def test_a_query_alone_reads_what_is_resident(
    query: tuple[int, ...], layout: int, resident: KeyShape, batch: int, heads: int, length: int
) -> None:
    found = problem(query, layout=layout, resident=resident)
    assert (found.batch, found.query_heads, found.query_length) == (batch, heads, length)
    assert (found.kv_heads, found.key_dim, found.value_dim, found.kv_length) == (*resident, 0)
    assert found.tensors.keys() == {"query"}
    assert found.bottom_right, "new tokens see all that came before them"


def test_what_is_appended_has_a_length_of_its_own() -> None:
    found = problem((3, 4, 5, 8), (3, 2, 7, 8), (3, 2, 7, 6), mask=messages.tensor(np.ones((5, 99), bool)))
    assert (found.kv_length, found.query_length) == (7, 5)
    assert found.tensors.keys() == {"query", "key", "value", "mask"}, "the mask is checked against all that is there"


@pytest.mark.parametrize(
    ("shapes", "fields", "field", "words"),
    [
        (((3, 4, 5, 7),), {}, "query.shape", "width 8, as the keys of the caches have"),
        (((3, 3, 5, 8),), {}, "query.shape", "a multiple of the 2 heads of the caches, found 3 heads"),
        (((3, 3, 5, 8), (3, 2, 1, 8), (3, 2, 1, 6)), {}, "query.shape", "a multiple of the 2 heads of key"),
        (((5, 8),), {}, "query.shape", "a multiple of the 2 heads of the caches, found 1 head"),
        (((5, 7),), {}, "query.shape", "a multiple of the 2 heads of the caches, found 1 head"),
        (((3, 4, 5, 8), (3, 4, 5, 8), (3, 4, 5, 6)), {}, "key.shape", "2 heads, as the caches have, found 4 heads"),
        (((5, 8), (5, 8), (5, 6)), {}, "key.shape", "2 heads, as the caches have, found 1 head"),
        (((3, 4, 5, 8), (3, 1, 5, 8), (3, 2, 5, 6)), {}, "value.shape", "1 head as in key, found shape [3, 2, 5, 6]"),
        (((3, 4, 5, 8), (3, 2, 5, 8), (3, 1, 5, 6)), {}, "value.shape", "2 heads as in key, found shape [3, 1, 5, 6]"),
        (
            ((3, 4, 5, 8), (3, 2, 5, 7), (3, 2, 5, 6)),
            {},
            "key.shape",
            "width 8, as the keys of the caches have, found shape [3, 2, 5, 7]",
        ),
        (
            ((3, 4, 5, 8), (3, 2, 5, 8), (3, 2, 5, 8)),
            {},
            "value.shape",
            "width 6, as the values of the caches have, found shape [3, 2, 5, 8]",
        ),
        (((3, 4, 5, 8), (3, 2, 5, 8)), {}, "value", ""),
        (((3, 4, 5, 8), None, (3, 2, 5, 6)), {}, "key", ""),
        (((5, 4, 8),), {"layout": pb.LAYOUT_PACKED}, "layout", "heads first or length first with caches"),
    ],
)
def test_what_does_not_fit_is_named(shapes: Any, fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        problem(*shapes, **fields)
    assert caught.value.field == field
    assert words in str(caught.value)
