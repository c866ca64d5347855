"""Requests to a layer that break the contract: the error names the field, and no other request is affected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import calls
import grpc
import numpy as np
import pytest
from checkpoints import VOCABULARY
from conftest import Server
from numpy.typing import NDArray
from occupied import Occupied

from attnserve import Client, InvalidRequestError, NotFoundError, _dtypes
from attnserve._errors import AttnServeError, error_from_status, status_from_rpc_error
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

SERVICE = "/attnserve.v1.AttentionService/"
PATIENCE_S = 60.0
RNG = np.random.default_rng(4)

Fields = dict[str, Any]


def tensor(array: Any, **changes: Any) -> tensor_pb2.Tensor:
    """An array as a message; `changes` break it."""
    data = np.ascontiguousarray(array)
    fields = {"dtype": _dtypes.WIRE[data.dtype], "shape": np.shape(array), "data": data.tobytes()}
    return tensor_pb2.Tensor(**fields | changes)


def normal(*shape: int, dtype: Any = np.float64) -> NDArray[Any]:
    return RNG.standard_normal(shape).astype(dtype)


def ids(*shape: int) -> NDArray[Any]:
    return RNG.integers(VOCABULARY, size=shape)


def request(fields: Fields) -> pb.ApplyRequest:
    """A request; arrays become tensors, None means absent."""
    given: Fields = {name: tensor(each) if isinstance(each, np.ndarray) else each for name, each in fields.items()}
    return pb.ApplyRequest(**given)


SELF: Fields = {"layer": "rotary", "input": normal(2, 5, 24)}
PACKED: Fields = {"layer": "rotary", "input": normal(10, 24), "lengths": np.array([4, 6])}
CROSS: Fields = {"layer": "additive", "input": normal(2, 5, 24), "context": normal(2, 6, 10)}
DECODER: Fields = {"layer": "decoder/relu/post", "input": normal(2, 5, 24), "context": normal(2, 6, 24)}
BERT: Fields = {"layer": "bert", "input": ids(2, 5)}
GPT2: Fields = {"layer": "gpt2", "input": ids(2, 5)}
GOOD = {"self": SELF, "packed": PACKED, "cross": CROSS, "decoder": DECODER, "bert": BERT, "gpt2": GPT2}

BROKEN: dict[str, list[tuple[Fields, str]]] = {
    "layer": [(SELF | {"layer": ""}, "layer")],
    "causal": [(BERT | {"causal": True}, "causal"), (DECODER | {"causal": False}, "causal")],
    "alignment": [(SELF | {"alignment": 9}, "alignment"), (SELF | {"alignment": -1}, "alignment")],
    "window": [
        (SELF | {"window": pb.Window(left=-2, right=0)}, "window.left"),
        (SELF | {"window": pb.Window(left=0, right=-7)}, "window.right"),
        (GPT2 | {"window": pb.Window(left=2, right=0)}, "window"),
    ],
    "caches": [(SELF | {"caches": [pb.CacheReference(name="x")]}, "caches")],
    "return_lse": [(GPT2 | {"return_lse": True}, "return_lse")],
    "return_scores": [
        (SELF | {"return_scores": 17}, "return_scores"),
        (DECODER | {"return_scores": pb.SCORE_STAGE_WEIGHTS}, "return_scores"),
    ],
    "priority": [(SELF | {"priority": 9}, "priority"), (BERT | {"priority": -9}, "priority")],
    "average_scores": [
        (SELF | {"average_scores": True}, "average_scores"),
        (BERT | {"average_scores": True}, "average_scores"),
    ],
    "input": [
        (SELF | {"input": None}, "input"),
        (SELF | {"input": tensor(normal(2, 5, 24), dtype=99)}, "input.dtype"),
        (SELF | {"input": np.ones((2, 5, 24), np.bool_)}, "input.dtype"),
        (SELF | {"input": ids(2, 5)}, "input.dtype"),
        (SELF | {"input": normal(2, 5, 23)}, "input.shape"),
        (SELF | {"input": normal(24)}, "input.shape"),
        (SELF | {"input": normal(1, 2, 5, 24)}, "input.shape"),
        (SELF | {"input": tensor(normal(2, 5, 24), shape=[2, -5, 24])}, "input.shape"),
        (SELF | {"input": tensor(normal(1), shape=[1] * 30_000)}, "input.shape"),
        (SELF | {"input": tensor(normal(2, 5, 24), data=b"too short")}, "input.data"),
        (BERT | {"input": normal(2, 5)}, "input.dtype"),
        (BERT | {"input": ids(2, 5, 1)}, "input.shape"),
        (BERT | {"input": np.array([[3, VOCABULARY]])}, "input"),
        (GPT2 | {"input": np.array([-1, 3])}, "input"),
        (GPT2 | {"input": ids(1, 33)}, "input"),  # there are 32 positions
    ],
    "context": [
        (CROSS | {"context": None}, "context"),
        (DECODER | {"context": None}, "context"),
        (CROSS | {"context": normal(2, 6, 11)}, "context.shape"),
        (CROSS | {"context": normal(3, 6, 10)}, "context.shape"),
        (CROSS | {"context": normal(6, 10)}, "context.shape"),
        (CROSS | {"context": normal(2, 6, 10, dtype=np.float32)}, "context.dtype"),
        (CROSS | {"context": ids(2, 6, 10)}, "context.dtype"),
        (CROSS | {"context": tensor(normal(2, 6, 10), data=b"")}, "context.data"),
        (BERT | {"context": normal(2, 6, 24)}, "context"),
        ({"layer": "encoder/relu/pre", "input": normal(2, 5, 24), "context": normal(2, 6, 24)}, "context"),
    ],
    "mask": [
        (SELF | {"mask": normal(5, 5)}, "mask.dtype"),
        (SELF | {"mask": np.ones((5, 4), np.bool_)}, "mask.shape"),
        (SELF | {"mask": np.ones((2, 3, 5, 5), np.bool_)}, "mask.shape"),
        (SELF | {"mask": np.ones((1, 2, 4, 5, 5), np.bool_)}, "mask.shape"),
        (CROSS | {"mask": np.ones((5, 5), np.bool_)}, "mask.shape"),
        (DECODER | {"mask": np.ones((5, 6), np.bool_)}, "mask.shape"),  # the shape for its self-attention
        (PACKED | {"mask": np.ones((1, 1, 10, 10), np.bool_)}, "mask.shape"),
    ],
    "bias": [
        (SELF | {"bias": np.ones((5, 5), np.bool_)}, "bias.dtype"),
        (SELF | {"bias": normal(3, 1, 5, 5)}, "bias.shape"),
        (BERT | {"bias": normal(5, 5)}, "bias"),
    ],
    "lengths": [
        (SELF | {"lengths": np.array([4.0, 5.0])}, "lengths.dtype"),
        (SELF | {"lengths": np.array([4, 5, 1])}, "lengths.shape"),
        (SELF | {"lengths": np.array([4, 6])}, "lengths[1]"),
        (SELF | {"lengths": np.array([-1, 5])}, "lengths[0]"),
        (PACKED | {"lengths": np.array([[4, 6]])}, "lengths.shape"),
        (PACKED | {"lengths": np.array([4, 5])}, "lengths"),
        (PACKED | {"lengths": np.array([-1, 11])}, "lengths[0]"),
        (PACKED | {"lengths": np.array([1 << 62, 1 << 62])}, "lengths[0]"),
        (BERT | {"lengths": np.array([1, 9])}, "lengths[1]"),
    ],
    "context_lengths": [
        (SELF | {"context_lengths": np.array([1, 1])}, "context_lengths"),
        (CROSS | {"context_lengths": np.array([7, 1])}, "context_lengths[0]"),
        (CROSS | {"context_lengths": np.array([1])}, "context_lengths.shape"),
        (PACKED | {"context": normal(7, 24)}, "context_lengths"),
        (PACKED | {"context": normal(7, 24), "context_lengths": np.array([3, 3])}, "context_lengths"),
        (PACKED | {"context": normal(7, 24), "context_lengths": np.array([7])}, "context_lengths.shape"),
    ],
    "query_offset": [
        (SELF | {"query_offset": np.array([0.5, 1.0])}, "query_offset.dtype"),
        (SELF | {"query_offset": np.array([1, 2, 3])}, "query_offset.shape"),
        (SELF | {"query_offset": np.array([0, 1 << 50])}, "query_offset[1]"),
        (GPT2 | {"query_offset": np.array([0, 28])}, "query_offset"),
        (GPT2 | {"query_offset": np.array([-1, 0])}, "query_offset"),
    ],
    "segments": [
        (SELF | {"segments": ids(2, 5)}, "segments"),
        (GPT2 | {"segments": ids(2, 5)}, "segments"),
        (BERT | {"segments": normal(2, 5)}, "segments.dtype"),
        (BERT | {"segments": ids(2, 4)}, "segments.shape"),
        (BERT | {"segments": np.full((2, 5), 2)}, "segments"),
    ],
}
"""For each field of `ApplyRequest`, requests that it makes invalid, and the path that the error names."""

CASES = [
    pytest.param(fields, path, id=f"{name}-{n}")
    for name, cases in BROKEN.items()
    for n, (fields, path) in enumerate(cases)
]


@pytest.fixture(scope="module")
def channel(layer_server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(layer_server.address) as channel:
        yield channel


def apply(channel: grpc.Channel, message: bytes) -> pb.ApplyResponse:
    """A unary call. Raises the SDK error that it ends with."""
    method: Any = channel.unary_unary(SERVICE + "Apply")
    try:
        return pb.ApplyResponse.FromString(method(message, timeout=PATIENCE_S))
    except grpc.RpcError as error:
        raise error_from_status(status_from_rpc_error(error)) from None


def test_every_field_has_a_case() -> None:
    assert set(BROKEN) == set(pb.ApplyRequest.DESCRIPTOR.fields_by_name)
    assert all(BROKEN.values())


@pytest.mark.parametrize("name", GOOD)
def test_what_is_broken_here_was_whole(channel: grpc.Channel, name: str) -> None:
    """Otherwise the cases would prove nothing."""
    assert apply(channel, request(GOOD[name]).SerializeToString()).output.data


@pytest.mark.parametrize(("fields", "path"), CASES)
def test_the_field_is_named(channel: grpc.Channel, fields: Fields, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        apply(channel, request(fields).SerializeToString())
    assert caught.value.field == path
    assert str(caught.value).startswith(f"{path}: expected ")


def test_bad_requests_among_good_ones(channel: grpc.Channel, layer_server: Server) -> None:
    """Every bad one between good ones in a single message: each gets its own reply, the good ones run together."""
    broken = [case for cases in BROKEN.values() for case in cases]
    unknown: Fields = SELF | {"layer": "nobody"}
    sent = []
    for n, (fields, _) in enumerate([*broken, (unknown, "")]):
        sent += [
            pb.AttendStreamCall(id=2 * n, apply=request(SELF)),
            pb.AttendStreamCall(id=2 * n + 1, apply=request(fields)),
        ]
    stream = calls.Stream(channel)
    with Occupied(layer_server) as device:  # however long it takes to read them all
        stream.send(*sent)
        stream.half_close()
        device.until_waiting(len(broken) + 1)
    replies = {reply.id: reply for reply in stream.rest()}
    assert len(replies) == len(sent)
    expected = apply(channel, request(SELF).SerializeToString()).output
    for n, (_, path) in enumerate(broken):
        assert replies[2 * n].apply.output == expected
        error = error_from_status(replies[2 * n + 1].error)
        assert isinstance(error, InvalidRequestError)
        assert error.field == path
    assert max(reply.apply.batch_size for reply in replies.values()) > len(broken) // 2
    assert isinstance(error_from_status(replies[2 * len(broken) + 1].error), NotFoundError)


def test_numbers_for_token_ids_are_told_from_rows(channel: grpc.Channel) -> None:
    with pytest.raises(InvalidRequestError, match="token ids are int64"):
        apply(channel, request(BERT | {"input": normal(5)}).SerializeToString())


@pytest.mark.parametrize("name", ["nobody", "rotary/", "ROTARY", "../rotary", "\N{SNOWMAN}", "x" * 1_000_000])
def test_a_layer_that_is_not_there(channel: grpc.Channel, layer_client: Client, name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        apply(channel, request(SELF | {"layer": name}).SerializeToString())
    assert caught.value.reason == "NOT_FOUND"
    with pytest.raises(NotFoundError):
        layer_client.apply(name, normal(5, 24))


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x82\x01\x02\x08"])
def test_what_is_no_message(channel: grpc.Channel, message: bytes) -> None:
    with pytest.raises(AttnServeError) as caught:
        apply(channel, message)
    assert caught.value.reason == "MALFORMED_MESSAGE"


def test_sequences_without_rows_cost_nothing(channel: grpc.Channel) -> None:
    """However many a request claims: two thousand million in a message of a few bytes."""
    many = (1 << 31) - 1
    empty = np.zeros((1, 0, 24))
    begin = time.perf_counter()
    reply = apply(channel, request(SELF | {"input": tensor(empty, shape=[many, 0, 24])}).SerializeToString())
    assert list(reply.output.shape) == [many, 0, 20]
    fields: Fields = SELF | {
        "input": tensor(empty, shape=[many, 0, 24]),
        "context": tensor(empty, shape=[many, 0, 24]),
        "mask": tensor(np.zeros((1, 1, 0, 0), np.bool_), shape=[many, 1, 0, 0]),
        "query_offset": np.array([7]),
        "return_lse": True,
        "return_scores": pb.SCORE_STAGE_WEIGHTS,
    }
    reply = apply(channel, request(fields).SerializeToString())
    assert list(reply.scores.shape) == [many, 4, 0, 0]
    assert list(reply.lse.shape) == [many, 4, 0]
    assert time.perf_counter() - begin < 10.0


@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        (SELF, "[2, 4, 5, 5]"),
        (SELF | {"input": normal(5, 24)}, "[4, 5, 5]"),  # one sequence, without an axis for it
        (PACKED, "[2, 4, 6, 6]"),
    ],
)
def test_a_mask_is_compared_with_the_axes_that_the_caller_has(channel: grpc.Channel, fields: Fields, axes: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        apply(channel, request(fields | {"mask": np.ones((3, 7), np.bool_)}).SerializeToString())
    assert str(caught.value) == f"mask.shape: expected a shape that broadcasts to {axes}, found shape [3, 7]"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (SELF | {"input": normal(0, 24), "lengths": np.zeros(1_000_000, np.int64)}, "lengths.shape"),
        (SELF | {"input": np.zeros((20_000, 1, 24), np.float32)}, "input.shape"),
        (
            SELF
            | {"input": tensor(np.zeros((1, 0, 24)), shape=[20_000, 0, 24]), "lengths": np.zeros(20_000, np.int64)},
            "lengths.shape",
        ),
        (BERT | {"input": np.zeros((0,), np.int64), "lengths": np.zeros(20_000, np.int64)}, "lengths.shape"),
    ],
)
def test_more_sequences_than_there_may_be(channel: grpc.Channel, fields: Fields, path: str) -> None:
    with pytest.raises(InvalidRequestError, match="at most 16384 sequences") as caught:
        apply(channel, request(fields).SerializeToString())
    assert (caught.value.field, caught.value.reason) == (path, "LIMIT_EXCEEDED")
