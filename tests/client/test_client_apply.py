"""The arguments of `apply` as a message that stock protobuf reads, and its results from peers of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any, Literal, TypeAlias, get_type_hints

import grpc
import ml_dtypes
import numpy as np
import pytest
from calls import PATIENCE_S
from google.rpc.status_pb2 import Status
from peers import LAYER_VERSION, SERVICE, good, good_apply, good_unary, peer, replies

from attnserve import (
    ApplyOptions,
    AsyncClient,
    AttentionResult,
    Client,
    InvalidRequestError,
    LayerResult,
    NotFoundError,
    ProtocolError,
)
from attnserve._requests.apply import encode_apply
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

torch = pytest.importorskip("torch")


Apply: TypeAlias = Callable[..., list[Any]]
Transport: TypeAlias = Literal["stream", "unary"]

INPUT = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def request(layer: Any = "encoder/0", input: Any = INPUT, **options: Any) -> pb.ApplyRequest:
    call = encode_apply(layer, input, **options)
    data = b"".join(call.pieces)
    assert len(data) == call.size
    return pb.ApplyRequest.FromString(data)


def present(message: pb.ApplyRequest) -> set[str]:
    return {descriptor.name for descriptor, _ in message.ListFields()}


def contents(tensor: tensor_pb2.Tensor, dtype: Any) -> Any:
    return np.frombuffer(tensor.data, dtype).reshape(tuple(tensor.shape)).tolist()


def test_the_least() -> None:
    message = request()
    assert present(message) == {"layer", "input"}
    assert message.layer == "encoder/0"
    assert (message.input.dtype, list(message.input.shape), message.input.data) == (1, [2, 3, 4], INPUT.tobytes())


def test_everything() -> None:
    context = np.ones((2, 5, 6), np.float32)
    message = request(
        "décodeur/cross",
        context=context,
        mask=np.tri(3, 5, dtype=bool),
        bias=[[0.5]],
        lengths=[3, 1],
        context_lengths=np.array([5, 0], np.int32),
        segments=[[0, 1, 1], [0, 0, 0]],
        query_offset=-2,
        causal="bottom_right",
        window=(3, -1),
        return_lse=True,
        return_scores="weights",
        average_scores=True,
        priority=-3,
        timeout=1.0,
    )
    assert present(message) == {field.name for field in pb.ApplyRequest.DESCRIPTOR.fields} - {"caches"}
    assert message.layer == "décodeur/cross"
    assert contents(message.context, np.float32) == context.tolist()
    assert (message.mask.dtype, contents(message.mask, bool)) == (5, np.tri(3, 5, dtype=bool).tolist())
    assert (message.bias.dtype, contents(message.bias, np.float32)) == (1, [[0.5]])
    assert contents(message.lengths, np.int64) == [3, 1]
    assert contents(message.context_lengths, np.int64) == [5, 0]
    assert contents(message.segments, np.int64) == [[0, 1, 1], [0, 0, 0]]
    assert contents(message.query_offset, np.int64) == -2
    assert (message.causal, message.alignment) == (True, pb.ALIGNMENT_BOTTOM_RIGHT)
    assert (message.window.left, message.window.right) == (3, -1)
    assert (message.return_lse, message.return_scores) == (True, pb.SCORE_STAGE_WEIGHTS)
    assert (message.average_scores, message.priority) == (True, -3)


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (None, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (False, (True, pb.ALIGNMENT_UNSPECIFIED)),
        (0, (True, pb.ALIGNMENT_UNSPECIFIED)),
        (True, (True, pb.ALIGNMENT_TOP_LEFT)),
        (1, (True, pb.ALIGNMENT_TOP_LEFT)),
        ("top_left", (True, pb.ALIGNMENT_TOP_LEFT)),
        ("bottom_right", (True, pb.ALIGNMENT_BOTTOM_RIGHT)),
    ],
)
def test_causal_as_defined_differs_from_not_causal(causal: Any, expected: tuple[bool, int]) -> None:
    message = request(causal=causal)
    assert (message.HasField("causal"), message.alignment) == expected
    assert message.causal is bool(causal)


def test_the_window_of_nothing_is_not_the_layers_own() -> None:
    assert request(window=(0, 0)).HasField("window")
    assert not request(window=None).HasField("window")


@pytest.mark.parametrize(
    "ids", [[[5, 6, 7]], np.array([[5, 6, 7]], np.int32), torch.tensor([[5, 6, 7]]), np.array([[5, 6, 7]], ">u2")]
)
def test_token_ids_of_any_kind_travel_as_int64(ids: Any) -> None:
    message = request("minilm", ids)
    assert (message.input.dtype, contents(message.input, np.int64)) == (6, [[5, 6, 7]])


def test_one_length_is_the_length_of_one_sequence() -> None:
    message = request("minilm", [5, 6, 7], lengths=3)
    assert contents(message.lengths, np.int64) == [3]
    assert contents(request(query_offset=3).query_offset, np.int64) == 3


def test_equal_headers_carry_their_own_contents() -> None:
    for number in range(3):
        array = np.full((2, 4), number, np.float32)
        message = request("a", array, context=array + 1, lengths=[number])
        assert message.input.data == array.tobytes()
        assert message.context.data == (array + 1).tobytes()
        assert message.lengths.data == np.int64(number).tobytes()
    assert [request(name, INPUT).layer for name in ("a", "b", "a")] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"layer": ""}, "layer"),
        ({"layer": None}, "layer"),
        ({"layer": b"minilm"}, "layer"),
        ({"layer": "\ud800"}, "layer"),
        ({"input": np.ones((2, 2), bool)}, "input"),
        ({"input": "ids"}, "input"),
        ({"input": [[1], [2, 3]]}, "input"),
        ({"context": np.ones((2, 2), int)}, "context"),
        ({"mask": np.ones(3, np.float32)}, "mask"),
        ({"bias": np.ones(3, int)}, "bias"),
        ({"lengths": [1.0]}, "lengths"),
        ({"context_lengths": [True]}, "context_lengths"),
        ({"segments": [0.0]}, "segments"),
        ({"query_offset": "1"}, "query_offset"),
        ({"causal": "bottom_left"}, "causal"),
        ({"window": 3}, "window"),
        ({"window": (1.5, 2)}, "window.left"),
        ({"return_scores": "all"}, "return_scores"),
        ({"priority": 1.0}, "priority"),
        ({"priority": 0.0}, "priority"),
        ({"priority": np.array([0, 0])}, "priority"),
        ({"priority": True}, "priority"),
        ({"window": (1, False)}, "window.right"),
        ({"timeout": True}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"return_lse": "false"}, "return_lse"),
        ({"average_scores": "false"}, "average_scores"),
    ],
)
def test_what_no_server_would_take_names_its_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(**options)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: expected")


def test_the_timeout_of_a_call_wins_over_the_clients() -> None:
    def timeout(**options: Any) -> float | None:
        return encode_apply("a", INPUT, default_timeout=60.0, **options).timeout

    assert (timeout(), timeout(timeout=1), timeout(timeout=None), timeout(timeout=0)) == (60.0, 1.0, None, 0.0)


def test_the_typed_options_are_the_arguments() -> None:
    arguments = set(encode_apply.__kwdefaults__ or ()) - {"default_timeout"}
    assert set(get_type_hints(ApplyOptions)) == arguments


def apply_in_threads(address: str, inputs: list[Any], *, transport: Transport = "stream", **options: Any) -> list[Any]:
    with Client(address, transport=transport) as client:
        futures = [client.submit_apply("layer", input, timeout=PATIENCE_S, **options) for input in inputs]
        wait(futures)
        return [future.exception() or future.result() for future in futures]


def apply_in_tasks(address: str, inputs: list[Any], *, transport: Transport = "stream", **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with AsyncClient(address, transport=transport) as client:
            calls = [client.apply("layer", input, timeout=PATIENCE_S, **options) for input in inputs]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    return asyncio.run(run())


@pytest.fixture(params=[apply_in_threads, apply_in_tasks], ids=["Client", "AsyncClient"])
def apply(request: pytest.FixtureRequest) -> Apply:
    """Applies a layer to some inputs at once and returns results and errors."""
    function: Apply = request.param
    return function


@pytest.fixture(params=["stream", "unary"])
def transport(request: pytest.FixtureRequest) -> Transport:
    name: Transport = request.param
    return name


@pytest.fixture
def address() -> Iterator[str]:
    """A peer that answers every call."""
    with peer(good, good_unary, {SERVICE: {"Apply": good_apply}}) as address:
        yield address


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_results(apply: Apply, transport: Transport, address: str, dtype: Any) -> None:
    inputs = [np.full((1 + number % 3, 4), number).astype(dtype) for number in range(30)]
    results = apply(address, inputs, transport=transport, return_lse=True, return_scores="weights")
    for input, result in zip(inputs, results, strict=True):
        assert isinstance(result, LayerResult)
        np.testing.assert_array_equal(result.output, input)
        assert result.output.dtype == dtype
        assert result.lse is not None
        assert result.scores is not None
        assert (result.lse.shape, result.scores.shape) == (input.shape[:1], input.shape)
        assert (result.layer_version, result.batch_size) == (LAYER_VERSION, 1)
        assert result.timings.total > 0
        result.output[:] = 0  # the caller's own memory


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_the_output_of_token_ids_has_the_dtype_of_the_layer(
    apply: Apply, transport: Transport, address: str, kind: Any
) -> None:
    (result,) = apply(address, [kind([1, 2, 3])], transport=transport, lengths=[2, 1])
    assert (result.lse, result.scores) == (None, None)
    if kind is torch.tensor:
        assert torch.equal(result.output, torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16))
    else:
        assert result.output.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(result.output.astype(np.float32), [[1], [2], [3]])


def test_torch_in_torch_out(apply: Apply, transport: Transport, address: str) -> None:
    tensor = torch.randn(2, 3, dtype=torch.float16)
    (result,) = apply(address, [tensor], transport=transport, return_lse=True)
    assert torch.equal(result.output, tensor)
    assert isinstance(result.lse, torch.Tensor)


def test_attentions_and_layers_share_a_client(transport: Transport, address: str) -> None:
    with Client(address, transport=transport) as client:
        arrays = [np.full((2, 3), number, np.float32) for number in range(40)]
        futures: list[Any] = [
            client.submit(array, array, array) if number % 2 else client.submit_apply("layer", array)
            for number, array in enumerate(arrays)
        ]
        for number, (array, future) in enumerate(zip(arrays, futures, strict=True)):
            result = future.result(timeout=PATIENCE_S)
            assert isinstance(result, AttentionResult if number % 2 else LayerResult)
            np.testing.assert_array_equal(result.output, array)
        np.testing.assert_array_equal(client.apply("layer", arrays[3]).output, arrays[3])


def changed(change: Callable[[Any], None]) -> Callable[..., Iterator[bytes]]:
    """The stream of a peer that answers and changes its replies first."""

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            for answer in replies(message):
                decoded = pb.AttendStreamResponse.FromString(answer)
                change(decoded.replies[0])
                yield decoded.SerializeToString()

    return stream


def attend_instead(reply: pb.AttendStreamReply) -> None:
    reply.attend.output.CopyFrom(reply.apply.output)


def integers_instead(reply: pb.AttendStreamReply) -> None:
    reply.apply.output.dtype = tensor_pb2.DATA_TYPE_INT64


def no_output(reply: pb.AttendStreamReply) -> None:
    reply.apply.ClearField("output")


def no_scores(reply: pb.AttendStreamReply) -> None:
    reply.apply.ClearField("scores")


@pytest.mark.parametrize("input", [INPUT[0], [1, 2]], ids=["activations", "ids"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (attend_instead, "answered apply with the result of attend"),
        (integers_instead, "output: expected .*, the server replied with int64"),
        (no_output, "output: expected .*, the server replied with no output"),
        (no_scores, "scores: asked for"),
    ],
)
def test_nonsense(apply: Apply, change: Callable[[Any], None], message: str, input: Any) -> None:
    with peer(changed(change)) as address:
        (result,) = apply(address, [input], return_scores="raw")
    assert isinstance(result, ProtocolError)
    with pytest.raises(ProtocolError, match=message):
        raise result


def test_an_output_of_another_dtype_than_the_input(apply: Apply) -> None:
    def other(reply: pb.AttendStreamReply) -> None:
        reply.apply.output.dtype = tensor_pb2.DATA_TYPE_FLOAT16
        reply.apply.output.shape[0] *= 2

    with peer(changed(other)) as address:
        (result,) = apply(address, [INPUT[0]])
    assert isinstance(result, ProtocolError)
    assert str(result) == "output: expected float32, the server replied with float16"


@pytest.mark.parametrize("input", [INPUT[0], [1, 2]], ids=["activations", "ids"])
def test_an_output_of_another_shape_than_the_input(apply: Apply, input: Any) -> None:
    def other(reply: pb.AttendStreamReply) -> None:
        reply.apply.output.shape[:] = [1, *reply.apply.output.shape]

    with peer(changed(other)) as address:
        (result,) = apply(address, [input])
    assert isinstance(result, ProtocolError)
    rows = ", ".join(map(str, np.shape(input)[: None if isinstance(input, list) else -1]))
    assert str(result).startswith(f"output: expected the shape [{rows}, ...], the server replied with [1, {rows}, ")


def test_no_such_layer(apply: Apply, transport: Transport) -> None:
    def missing(reply: pb.AttendStreamReply) -> None:
        reply.error.CopyFrom(Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="no layer of that name"))

    def missing_unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, "no layer of that name")

    with peer(changed(missing), None, {SERVICE: {"Apply": missing_unary}}) as address:
        results = apply(address, [INPUT, INPUT], transport=transport)
    assert [type(result) for result in results] == [NotFoundError] * 2
    assert isinstance(results[0], LookupError)
    assert str(results[0]) == "no layer of that name"
