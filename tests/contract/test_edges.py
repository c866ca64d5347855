"""Edge cases, legal and illegal: zero lengths, huge numbers, misaligned payloads, broken requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import accuracy
import calls
import grpc
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
from bits import assert_same_bits
from cases import BEYOND_FLOAT32, DTYPES, Case, Plan
from conftest import Server

import attnserve
from attnserve import AsyncClient, Client, InvalidRequestError
from attnserve.v1 import attention_pb2 as pb

EVERY_DTYPE = pytest.mark.parametrize("dtype", sorted(DTYPES))


@EVERY_DTYPE
@pytest.mark.parametrize("scores", [None, *oracle.STAGES])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
def test_zero_lengths(client: Client, batch: int, queries: int, keys: int, scores: str | None, dtype: str) -> None:
    for options in ({}, {"causal": "bottom_right", "alibi": True, "sinks": True}, {"score": "additive"}):
        plan = Plan(dtype=dtype, batch=batch, query_length=queries, key_length=keys, group=2, **options)
        case = plan.case(0)
        accuracy.check(case, case.attend(client, return_lse=True, return_scores=scores), scores)


@EVERY_DTYPE
@pytest.mark.parametrize("scores", [None, *oracle.STAGES])
@pytest.mark.parametrize(("queries", "keys"), [((), ()), ((0, 0), (0, 0)), ((0, 2, 0), (3, 0, 1)), ((2, 1), (0, 4))])
def test_zero_lengths_packed(
    client: Client, queries: tuple[int, ...], keys: tuple[int, ...], scores: str | None, dtype: str
) -> None:
    plan = Plan(dtype=dtype, layout="packed", rank=3, query_lengths=queries, kv_lengths=keys, causal=True, sinks=True)
    case = plan.case(0)
    accuracy.check(case, case.attend(client, return_lse=True, return_scores=scores), scores)


@pytest.mark.parametrize("options", [{"score": "additive"}, {"softcap": 1.0}, {"alibi": True}, {"sinks": True}])
def test_masks_and_biases_of_no_elements(client: Client, options: dict[str, Any]) -> None:
    case = Plan(key_length=0, mask_shape=(5, 0), bias_shape=(2, 1, 5, 0), **options).case(0)
    accuracy.check(case, case.attend(client, return_lse=True))


@EVERY_DTYPE
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "query_offset": 2**40},
        {"causal": True, "query_offset": -(2**40)},
        {"causal": True, "query_offset": (-(2**33), 2**33)},
        {"window": (2**62, 2**62)},
        {"window": (2**62, 0), "query_offset": 2**40},
        {"window": (0, 2**63 - 1), "query_offset": -(2**40)},
        {"window": (0, 2**40 - 2), "query_offset": -(2**40)},
        {"kv_lengths": (0, 7), "query_offset": -1, "causal": True, "window": (0, 0)},
    ],
)
def test_huge_positions(client: Client, options: dict[str, Any], dtype: str) -> None:
    case = Plan(dtype=dtype, **options).case(1)
    accuracy.check(case, case.attend(client, return_lse=True))
    accuracy.check(case, case.attend(client, return_scores="weights"), "weights")


@EVERY_DTYPE
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 7), "sinks": True}, {"score": "general"}])
def test_long_sequences(client: Client, options: dict[str, Any], dtype: str) -> None:
    """Megabytes, which arrive in pieces, are divided among threads and are computed block by block."""
    sizes: dict[str, Any] = {"query_length": 533, "key_length": 701, "head_dim": 64, "key_dim": 64, "value_dim": 64}
    case = Plan(dtype=dtype, key_heads=2, group=2, **sizes, **options).case(2)
    accuracy.check(case, case.attend(client, return_lse=True))


@EVERY_DTYPE
@pytest.mark.parametrize("factor", [1e-4, 30.0])
def test_large_and_small_queries(client: Client, factor: float, dtype: str) -> None:
    """Scores in the hundreds, whose exponentials overflow unless the maximum is subtracted first; and tiny ones."""
    plan = Plan(dtype=dtype, query_length=20, key_length=30, causal=True, scale=factor)
    case = plan.case(2)
    result = case.attend(client, return_lse=True)
    assert np.isfinite(result.output.astype(np.float64)).all()
    accuracy.check(case, result)


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 20])
def test_an_average_of_the_largest_values_is_none_larger(client: Client, length: int, dtype: str) -> None:
    """Whatever is asked for beside it: the sum of the weighted values, undivided, exceeds the dtype."""
    case = Plan(dtype=dtype, query_length=length, key_length=100).case(2)
    largest = float(ml_dtypes.finfo(case.value.dtype).max)
    case.value[...] = np.random.default_rng(2).uniform(0.5, 1, case.value.shape) * (0.9 * largest)
    bound = {"float32": 2e-6, "float64": 1e-12, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for returned in ({}, {"return_lse": True}, {"return_scores": "weights"}):
        output = case.attend(client, **returned).output.astype(np.float64)
        np.testing.assert_allclose(output / largest, case.expected.output / largest, rtol=0, atol=bound)


@EVERY_DTYPE
def test_negative_zeros_and_subnormals(client: Client, dtype: str) -> None:
    case = Plan(dtype=dtype, query_length=3, key_length=4).case(3)
    case.query[:, :, 0] = -0.0
    case.value[:, :, 1] = np.finfo(np.float16).smallest_subnormal
    accuracy.check(case, case.attend(client, return_lse=True))


@EVERY_DTYPE
@pytest.mark.parametrize("returned", [{}, {"return_scores": "weights"}])
def test_nan_and_infinities_reach_the_rows_that_attend_them_and_no_other(
    client: Client, returned: dict[str, Any], dtype: str
) -> None:
    for number, poison in enumerate((np.nan, np.inf, -np.inf)):
        case = Plan(dtype=dtype, group=2, query_length=6, key_length=6, causal=True, query_offset=-1).case(number)
        case.query[:, 0, [0, 4], 2] = np.nan  # row 0 attends to nothing
        case.key[:, 0, 5] = np.nan  # beyond what the last row attends to
        case.key[:, 1, 3, 0] = np.nan
        case.value[0, :, 2, 1] = poison
        case.value[1, :, 5] = poison
        result = case.attend(client, return_lse=True, **returned)
        output = result.output.astype(np.float64)
        assert np.isnan(output[:, 0, 4]).all()
        assert np.isnan(output[:, 2:, 4:]).all()
        assert not np.isfinite(output[0, :, 3:, 1]).any()
        assert np.isfinite(output[:, :, :3]).all()
        accuracy.check(case, result, returned.get("return_scores"))


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 6])
def test_bits_do_not_depend_on_where_payloads_lie(server: Server, dtype: str, length: int) -> None:
    """An unknown leading field of a few bytes shifts all payloads of a message: no alignment is required."""
    case = Plan(dtype=dtype, query_length=length, key_length=19, head_dim=20, key_dim=20, value_dim=20).case(4)
    request = pb.AttendRequest(return_lse=True)
    for name in ("query", "key", "value"):
        array, tensor = getattr(case, name), getattr(request, name)
        tensor.dtype = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4}[dtype]
        tensor.shape.extend(array.shape)
        tensor.data = array.tobytes()
    message = request.SerializeToString()
    replies = []
    with grpc.insecure_channel(server.address) as channel:
        attend: Any = channel.unary_unary("/attnserve.v1.AttentionService/Attend")
        for filler in range(17):
            unknown = b"\xfa\x3e" + bytes([filler]) + bytes(filler)  # field 1007, which no version has
            replies.append(pb.AttendResponse.FromString(attend(unknown + message, timeout=60)))
    output = np.frombuffer(replies[0].output.data, DTYPES[dtype]).reshape(case.expected.output.shape)
    assert np.abs(output.astype(np.float64) - case.expected.output).max() <= accuracy.output_bound(case)
    for reply in replies[1:]:
        assert reply.output.data == replies[0].output.data
        assert reply.lse.data == replies[0].lse.data


@EVERY_DTYPE
def test_arrays_of_any_strides(client: Client, dtype: str) -> None:
    """Transposed, reversed and sliced arrays are sent as they index, not as they lie in memory."""
    case = Plan(dtype=dtype, query_length=4, key_length=6).case(5)
    query = np.asfortranarray(case.query)
    key = np.ascontiguousarray(case.key[:, :, ::-1])[:, :, ::-1]
    value = np.repeat(case.value, 2, axis=3)[..., ::2]
    assert_same_bits(
        Case(query, key, value).attend(client).output, Case(case.query, case.key, case.value).attend(client).output
    )


@EVERY_DTYPE
def test_torch_in_torch_out(client: Client, dtype: str) -> None:
    case = Plan(dtype=dtype, causal=True).case(6)
    kind = getattr(torch, dtype)
    query, key, value = (
        torch.tensor(array.astype(np.float64)).to(kind) for array in (case.query, case.key, case.value)
    )
    result = client.attend(query, key, value, causal=True, return_lse=True)
    assert isinstance(result.output, torch.Tensor)
    assert result.output.dtype == kind
    same = case.attend(client, return_lse=True)
    np.testing.assert_array_equal(result.output.double().numpy(), same.output.astype(np.float64))
    assert isinstance(result.lse, torch.Tensor)
    np.testing.assert_array_equal(result.lse.numpy(), same.lse)


def _change(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(arguments: dict[str, Any]) -> None:
        arguments[name] = change(arguments.get(name))

    return apply


FLOATS = np.ones((2, 4, 5, 7), np.float32)

BROKEN: list[tuple[str, str, Callable[[dict[str, Any]], None]]] = [
    ("rank of the query", "query", _change("query", lambda q: q[None])),
    ("rank 1", "query", _change("query", lambda q: q[0, 0, 0])),
    ("rank of the key", "key", _change("key", lambda k: k[0])),
    ("dtype of the key", "key", _change("key", lambda k: k.astype(np.float64))),
    ("dtype of the value", "value", _change("value", lambda v: v.astype(np.float16))),
    ("heads that do not divide", "query", _change("query", lambda q: q[:, :3])),
    ("more key heads than query heads", "query", _change("query", lambda q: q[:, :1])),
    ("no heads", "query", _change("query", lambda q: q[:, :0])),
    ("no width", "query", _change("query", lambda q: q[..., :0])),
    ("batch of the key", "key", _change("key", lambda k: k[:1])),
    ("batch of the value", "value", _change("value", lambda v: v[:1])),
    ("width of the key", "key", _change("key", lambda k: k[..., :-1])),
    ("heads of the value", "value", _change("value", lambda v: v[:, :1])),
    ("length of the value", "value", _change("value", lambda v: v[:, :, :-1])),
    ("a mask that does not broadcast", "mask", _change("mask", lambda _: np.ones((5, 6), bool))),
    ("a mask of rank 5", "mask", _change("mask", lambda _: np.ones((1, 2, 4, 5, 7), bool))),
    ("a bias that does not broadcast", "bias", _change("bias", lambda _: FLOATS[:, :3])),
    ("a batch that would grow by its bias", "bias", _change("bias", lambda _: np.ones((3, 1, 1, 1), np.float32))),
    ("number of slopes", "alibi_slopes", _change("alibi_slopes", lambda _: FLOATS[0, :3, 0, 0])),
    ("rank of the sinks", "sinks", _change("sinks", lambda _: FLOATS[0, :, 0])),
    ("number of lengths", "kv_lengths", _change("kv_lengths", lambda _: [1, 2, 3])),
    ("a length above S", "kv_lengths", _change("kv_lengths", lambda _: [8, 1])),
    ("a negative length", "kv_lengths", _change("kv_lengths", lambda _: [-1, 1])),
    ("lengths of queries without packing", "query_lengths", _change("query_lengths", lambda _: [5, 5])),
    ("number of offsets", "query_offset", _change("query_offset", lambda _: [1, 2, 3])),
    ("a window below -1", "window", _change("window", lambda _: (-2, 0))),
    ("scale NaN", "scale", _change("scale", lambda _: float("nan"))),
    ("scale infinite", "scale", _change("scale", lambda _: float("inf"))),
    ("softcap negative", "softcap", _change("softcap", lambda _: -1.0)),
    ("softcap infinite", "softcap", _change("softcap", lambda _: float("inf"))),
    ("priority", "priority", _change("priority", lambda _: 9)),
    ("width of W", "general", _change("score", lambda _: attnserve.GeneralScore(FLOATS[0, 0, :, :]))),
    ("widths of Wq", "additive", _change("score", lambda _: attnserve.AdditiveScore(FLOATS[0, 0], FLOATS[0, 0]))),
    ("packed of rank 4", "query", _change("layout", lambda _: "packed")),
]


@pytest.mark.parametrize(("field", "change"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_broken_requests_name_the_field(
    server: Server, field: str, change: Callable[[dict[str, Any]], None], transport: Any
) -> None:
    case = Plan(group=2).case(7)
    arguments: dict[str, Any] = {"query": case.query, "key": case.key, "value": case.value}
    change(arguments)
    with Client(server.address, transport=transport) as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.attend(**arguments)
        assert caught.value.field is not None
        assert caught.value.field.startswith(field)
        assert "expected" in str(caught.value)
        accuracy.check(case, case.attend(client))


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_a_shape_that_does_not_fit_is_compared_with_the_axes_that_the_caller_has(client: Client, axes: int) -> None:
    rows = np.zeros((1, 2, 4, 8)[4 - axes :], np.float32)
    fits, wrong = list((1, 2, 4, 4)[4 - axes :]), np.ones((4, 5), bool)
    told = f"mask.shape: expected a shape that broadcasts to {fits}, found shape [4, 5]"
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(told)}"):
        client.attend(rows, rows, rows, mask=wrong)
    if axes > 2:
        with client.create_cache(2, 8) as cache, pytest.raises(InvalidRequestError, match=f"^{re.escape(told)}"):
            cache.attend(rows, rows, rows, mask=wrong)


def test_a_mask_of_keys_alone_is_told_where_its_axis_of_sequences_belongs(client: Client) -> None:
    rows, keys = np.zeros((3, 2, 4, 8), np.float32), np.ones((3, 4), bool)
    with pytest.raises(InvalidRequestError, match=re.escape("(one row of keys for each sequence is [3, 1, 1, 4])")):
        client.attend(rows, rows, rows, mask=keys)
    client.attend(rows, rows, rows, mask=keys[:, None, None])


PACKED_BROKEN = [
    ("sum of the query lengths", "query_lengths", {"query_lengths": [2, 2], "kv_lengths": [3, 4]}),
    ("sum of the key lengths", "kv_lengths", {"query_lengths": [2, 3], "kv_lengths": [3, 3]}),
    ("numbers of lengths", "kv_lengths", {"query_lengths": [2, 3], "kv_lengths": [7]}),
    ("no query lengths", "query_lengths", {"kv_lengths": [3, 4]}),
    ("no key lengths", "kv_lengths", {"query_lengths": [2, 3]}),
    ("negative", "query_lengths", {"query_lengths": [6, -1], "kv_lengths": [3, 4]}),
    ("mask", "mask", {"query_lengths": [2, 3], "kv_lengths": [3, 4], "mask": np.ones((2, 1, 3, 7), bool)}),
]


@pytest.mark.parametrize(("field", "options"), [case[1:] for case in PACKED_BROKEN], ids=[c[0] for c in PACKED_BROKEN])
def test_broken_packed_requests_name_the_field(client: Client, field: str, options: dict[str, Any]) -> None:
    query, keys = np.ones((5, 2, 4), np.float32), np.ones((7, 2, 4), np.float32)
    with pytest.raises(InvalidRequestError) as caught:
        client.attend(query, keys, keys, layout="packed", **options)
    assert caught.value.field is not None
    assert caught.value.field.startswith(field)


def test_biases_beyond_float32_are_values_all_the_same(client: Client) -> None:
    """A bias that float32 cannot hold is clamped to the largest that it can: never a mask, never NaN."""
    random = np.random.default_rng(0)
    query, key, value = random.standard_normal((3, 2, 5, 16)).astype(np.float32)
    everywhere = client.attend(query, key, value, bias=np.full((5, 5), -1e300), return_lse=True)
    np.testing.assert_allclose(everywhere.output, value.mean(1, keepdims=True).repeat(5, 1), atol=2e-6)
    assert np.isfinite(everywhere.lse).all()
    one = np.zeros((5, 5))
    one[:, 3] = 1e39
    result = client.attend(query, key, value, bias=one)
    np.testing.assert_array_equal(result.output, value[:, 3:4].repeat(5, 1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_scale_beyond_float32_picks_the_best_key(client: Client, dtype: str) -> None:
    query, key, value = np.random.default_rng(1).standard_normal((3, 2, 5, 16)).astype(DTYPES[dtype])
    best = np.argmax(query.astype(np.float64) @ key.astype(np.float64).transpose(0, 2, 1), -1)
    result = client.attend(query, key, value, scale=1e39)
    np.testing.assert_array_equal(result.output, np.take_along_axis(value, best[..., None], 1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("numbers", BEYOND_FLOAT32.values(), ids=BEYOND_FLOAT32)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask_shape": (5, 7)}, {"bias_shape": (7,), "sinks": True}, {"score": "general"}]
)
def test_scores_may_be_beyond_float32(
    client: Client, dtype: str, numbers: dict[str, Any], options: dict[str, Any]
) -> None:
    case = Plan(dtype=dtype, **options, **numbers).case(2)
    accuracy.check_beyond_float32(case, case.attend(client, return_lse=True))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_softcap_beyond_float32_spoils_no_scores(client: Client, dtype: str) -> None:
    case = Plan(dtype=dtype, causal=True, softcap=1e39).case(3)
    for stage in oracle.STAGES:
        accuracy.check(case, case.attend(client, return_lse=True, return_scores=stage), stage)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_reply_over_the_clients_own_limit_fails_its_call_alone(server: Server, transport: Any) -> None:
    options = [("grpc.max_receive_message_length", 200_000)]
    query, keys = np.ones((1, 1, 64), np.float32), np.ones((1, 10_000, 64), np.float32)
    many = np.ones((8, 400, 4), np.float32)  # 5 MB of scores

    def check(answered: Any, refused: Any) -> None:
        assert isinstance(answered, attnserve.AttentionResult)
        assert isinstance(refused, InvalidRequestError)
        assert refused.limit is None
        assert "the reply is longer than this client takes (grpc.max_receive_message_length)" in str(refused)

    with Client(server.address, transport=transport, options=options, timeout=calls.PATIENCE_S) as client:
        answered = client.submit(query, keys, keys)
        refused = client.submit(many, many, many, return_scores="raw")
        check(answered.result(), refused.exception())
    async with AsyncClient(server.address, transport=transport, options=options, timeout=calls.PATIENCE_S) as in_tasks:
        asked = in_tasks.attend(query, keys, keys), in_tasks.attend(many, many, many, return_scores="raw")
        check(*await asyncio.gather(*asked, return_exceptions=True))


def test_requests_that_are_too_large_for_any_server_are_refused(client: Client) -> None:
    wide = np.zeros((2, 0, 60_000_000), np.float32)
    with pytest.raises(InvalidRequestError, match="a reply of at most") as refused:
        client.attend(np.zeros((2, 4, 1), np.float32), np.zeros((2, 0, 1), np.float32), wide)
    assert refused.value.limit == "max_message_bytes"
    assert f"at most {client.server_info().limits.max_message_bytes} bytes (max_message_bytes)" in str(refused.value)
    lengths = np.zeros(20_000, np.int64)
    none = np.zeros((0, 1, 1), np.float32)
    with pytest.raises(InvalidRequestError, match="sequences"):
        client.attend(none, none, none, layout="packed", query_lengths=lengths, kv_lengths=lengths)
    units = np.zeros((50_000, 1), np.float32)
    score = attnserve.AdditiveScore(units, units)
    keys = np.zeros((1, 30_000, 1), np.float32)
    with pytest.raises(InvalidRequestError, match="bytes with its reply"):
        client.attend(keys[:, :1], keys, keys, score=score)


def test_a_timeout_of_ages_is_none(client: Client) -> None:
    query = np.ones((1, 2, 4), np.float32)
    others = [client.submit(query, query, query) for _ in range(3)]
    for timeout in (1e10, 1e25, 1e300):
        assert client.attend(query, query, query, timeout=timeout).output.shape == query.shape
    assert [future.result().output.shape for future in others] == [query.shape] * 3
