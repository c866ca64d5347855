"""Requests: what follows from the contents of lengths and offsets, their costs, and headers seen before."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import messages
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests import request as rooms
from attnserve_server.requests.extent import CALL_COST, Span
from attnserve_server.requests.problem import HEAD_COST, KEY_COST, PAIR_COST, ROW_COST
from attnserve_server.settings.config import Config

FAR = 2**40
"""Offsets beyond this are refused."""


def ints(*values: int) -> messages.Array:
    return np.array(values, np.int64)


def packed(query_lengths: messages.Array, kv_lengths: messages.Array, **fields: Any) -> pb.AttendRequest:
    """A packed request with totals 7 and 5."""
    query, key = np.zeros((7, 4, 8), np.float32), np.zeros((5, 2, 8), np.float32)
    lengths = {"query_lengths": query_lengths, "kv_lengths": kv_lengths}
    return messages.attend(query, key, key, layout=pb.LAYOUT_PACKED, **lengths, **fields)


def test_without_lengths_there_is_one_span() -> None:
    request = messages.read(messages.random_attend(0, 3, kv_length=5, batch=4))
    assert request.spans == (Span(0, 4, 0, 3, 0, 5, 0),)
    assert request.longest == (3, 5)


def test_sequences_with_equal_lengths_and_offsets_are_one_span() -> None:
    message = messages.random_attend(0, 3, kv_length=5, batch=5, kv_lengths=ints(5, 2, 2, 0, 2), causal=True)
    assert messages.read(message).spans == (
        Span(0, 1, 0, 3, 0, 5, 0),
        Span(1, 2, 0, 3, 0, 2, 0),
        Span(3, 1, 0, 3, 0, 0, 0),
        Span(4, 1, 0, 3, 0, 2, 0),
    )
    assert messages.read(message).longest == (3, 5)


def test_packed_sequences_lie_end_to_end() -> None:
    request = messages.read(packed(ints(3, 0, 4), ints(0, 1, 4)))
    assert request.spans == (
        Span(0, 1, 0, 3, 0, 0, 0),
        Span(1, 1, 3, 0, 0, 1, 0),
        Span(2, 1, 3, 4, 1, 4, 0),
    )
    assert request.longest == (4, 4)
    assert request.extent.query_tokens == 7


def test_packed_without_sequences() -> None:
    empty = np.zeros((0, 2, 8), np.float32)
    message = messages.attend(
        empty, empty, empty, layout=pb.LAYOUT_PACKED, query_lengths=ints(), kv_lengths=ints(), query_offset=ints()
    )
    request = messages.read(message)
    assert (request.spans, request.longest, request.extent.flops, request.extent.reply_bytes) == ((), (0, 0), 0, 0)


def test_packed_without_lengths_is_told_before_anything_about_heads() -> None:
    """Whose arrays are `[H, L, D]`, for another layout, has given no lengths either."""
    query, key = np.zeros((7, 4, 8), np.float32), np.zeros((7, 6, 8), np.float32)
    with pytest.raises(InvalidRequest, match=r"^query_lengths: expected the lengths of the packed sequences"):
        messages.read(messages.attend(query, key, key, layout=pb.LAYOUT_PACKED))


BOTTOM_RIGHT = {"causal": True, "alignment": pb.ALIGNMENT_BOTTOM_RIGHT}


@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({"causal": True}, [0]),
        (BOTTOM_RIGHT, [2]),
        (BOTTOM_RIGHT | {"kv_lengths": ints(5, 1)}, [2, -2]),  # not clamped
        (BOTTOM_RIGHT | {"query_offset": ints(7)}, [7]),  # an explicit offset wins
        (BOTTOM_RIGHT | {"query_offset": np.array(-7)}, [-7]),
        (BOTTOM_RIGHT | {"query_offset": ints(1, -1)}, [1, -1]),
        (BOTTOM_RIGHT | {"query_offset": ints(7), "kv_lengths": ints(5, 1)}, [7, 7]),
        ({"causal": True, "query_offset": ints(1, 1)}, [1]),
        ({"causal": True, "query_offset": ints(FAR, -FAR)}, [FAR, -FAR]),
        ({"window": pb.Window(left=1, right=-1), "query_offset": ints(3)}, [3]),
        ({"alibi_slopes": np.zeros(2, np.float32), "query_offset": ints(3)}, [3]),
        ({"query_offset": ints(1, 2)}, [0]),  # nothing depends on positions: one span
        ({"alignment": pb.ALIGNMENT_BOTTOM_RIGHT}, [0]),
    ],
)
def test_offsets(fields: dict[str, Any], offsets: list[int]) -> None:
    request = messages.read(messages.random_attend(0, 3, kv_length=5, batch=2, **fields))
    assert [span.offset for span in request.spans] == offsets


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (messages.random_attend(0, 3, batch=2, kv_lengths=ints(3, 4)), "kv_lengths[1]"),
        (messages.random_attend(0, 3, batch=2, kv_lengths=ints(-1, 3)), "kv_lengths[0]"),
        (messages.random_attend(0, 3, batch=2, kv_lengths=ints(-(2**63), 3)), "kv_lengths[0]"),
        (packed(ints(3, 3), ints(2, 3)), "query_lengths"),
        (packed(ints(3, 4), ints(2, 2)), "kv_lengths"),
        (packed(ints(8, -1), ints(2, 3)), "query_lengths[0]"),
        (packed(ints(-1, 7), ints(2, 3)), "query_lengths[0]"),
        (packed(ints(3, 4), ints(2**63 - 1, -(2**63))), "kv_lengths[0]"),
        (packed(ints(3, 4), ints(2, 3), mask=np.zeros((7, 5), bool)), "mask.shape"),
        (packed(ints(3, 4), ints(2, 3), bias=np.zeros((3, 1, 1, 1), np.float32)), "bias.shape"),
        (messages.random_attend(0, 3, causal=True, query_offset=ints(FAR + 1)), "query_offset[0]"),
        (messages.random_attend(0, 3, batch=2, causal=True, query_offset=ints(0, -FAR - 1)), "query_offset[1]"),
        (messages.random_attend(0, 3, causal=True, query_offset=ints(-(2**63))), "query_offset[0]"),
    ],
)
def test_contents_that_lie_are_named(message: pb.AttendRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages.read(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "flops"),
    [
        # 2 sequences of 3 queries and 5 keys, 4 heads: 2 * pairs * heads * (D + Dv)
        ({}, 2 * (2 * 3 * 5) * 4 * (8 + 8)),
        ({"causal": True}, 2 * (2 * (1 + 2 + 3)) * 4 * (8 + 8)),
        ({"causal": True, "softcap": 1.0}, 2 * (2 * 3 * 5) * 4 * (8 + 8)),
        ({"kv_lengths": ints(5, 1)}, 2 * (3 * 5 + 3 * 1) * 4 * (8 + 8)),
        ({"kv_lengths": ints(0, 0)}, 0),
        (
            {"general": pb.GeneralScore(weight=messages.tensor(np.zeros((8, 8), np.float32)))},
            2 * (2 * 3 * 5) * 4 * (8 + 8) + 2 * (2 * 3 * 4) * 8 * 8,
        ),
        (
            {
                "additive": pb.AdditiveScore(
                    query_weight=messages.tensor(np.zeros((6, 8), np.float32)),
                    key_weight=messages.tensor(np.zeros((6, 8), np.float32)),
                )
            },
            # each pair: an addition, a tanh (counted as two) and a multiply-add for each of 6 hidden units
            2 * (2 * 3 * 5) * 4 * (2 * 6 + 8) + 2 * 6 * 8 * (2 * 3 * 4 + 2 * 5 * 2),
        ),
    ],
)
def test_flops(fields: dict[str, Any], flops: int) -> None:
    message = messages.random_attend(0, 3, kv_length=5, batch=2, heads=4, kv_heads=2, **fields)
    assert messages.read(message).extent.flops == flops


def test_flops_of_packed_sequences_are_those_of_their_pairs() -> None:
    assert messages.read(packed(ints(3, 4), ints(5, 0))).extent.flops == 2 * (3 * 5) * 4 * (8 + 8)


def test_what_is_as_wide_as_heads_are_costs_its_flops() -> None:
    request = messages.read(messages.random_attend(0, 16, heads=8, width=64))
    assert request.extent.cost == request.effort == request.extent.flops


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "keys", "batch"),
    [
        (1 << 20, 1 << 20, 1, 1, 1),  # a third of a second or more: see `Problem.effort`
        (1 << 20, 1, 1, 1, 1),
        (1, 1, 1 << 20, 1, 1),
        (1, 1, 1, 1 << 20, 1),
        (16, 16, 1, 1, 1 << 14),
    ],
)
def test_what_is_narrow_costs_what_it_takes_and_is_not_computed_on_the_event_loop(
    heads: int, kv_heads: int, rows: int, keys: int, batch: int
) -> None:
    message = messages.random_attend(
        0, rows, kv_length=keys, batch=batch, heads=heads, kv_heads=kv_heads, width=1, dtype=np.float16
    )
    request = messages.read(message)
    assert request.extent.flops < 20 * 2**20
    assert request.extent.cost >= request.effort > Config().inline_flops


@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}])
def test_heads_cost_what_their_pairs_take_however_narrow_they_are(options: dict[str, Any]) -> None:
    """So that narrow heads gain their caller no share of the device, and do not spoil the rate of others."""
    narrow, wider = (messages.read(messages.random_attend(0, 512, heads=8, width=width, **options)) for width in (1, 8))
    assert narrow.extent.cost == wider.extent.cost > 2 * narrow.extent.flops
    causal = messages.read(messages.random_attend(0, 512, heads=8, width=1, causal=True, **options))
    assert causal.extent.cost < (0.51 if not options else 1.01) * narrow.extent.cost


@pytest.mark.parametrize(("dtype", "item_bytes"), [(np.float64, 8), (np.float32, 4)])
def test_the_effort_of_a_query_that_reads_more_than_it_computes_is_what_it_reads(dtype: Any, item_bytes: int) -> None:
    alone, many = (
        messages.read(messages.random_attend(0, rows, kv_length=1000, kv_heads=2, width=64, dtype=dtype))
        for rows in (1, 16)
    )
    read = 1000 * 2 * (64 + 64) * item_bytes
    assert alone.extent.flops < alone.effort == read
    assert many.effort == many.extent.flops == 16 * alone.extent.flops


def test_the_effort_of_narrow_heads_is_what_their_rows_and_keys_take() -> None:
    def effort(keys: int, batch: int = 1, **fields: Any) -> int:
        message = messages.random_attend(0, 1, kv_length=keys, heads=4, kv_heads=4, width=1, batch=batch, **fields)
        return messages.read(message).effort

    of_keys = 4 * (KEY_COST * 1000 + HEAD_COST)
    assert effort(1000) == 4 * ROW_COST + of_keys
    assert effort(2000) - effort(1000) == 4 * KEY_COST * 1000
    assert effort(2000, window=pb.Window(left=999, right=0), query_offset=ints(1500)) == effort(1000), (
        "beyond its reach, keys take nothing"
    )
    assert effort(2000, 5, window=pb.Window(left=999, right=0), query_offset=ints(1500)) == 5 * effort(1000)


def test_the_effort_of_narrow_heads_with_many_keys_is_what_their_pairs_take() -> None:
    narrow, written_out = (
        messages.read(messages.random_attend(0, 512, heads=8, width=1, softcap=softcap)) for softcap in (0.0, 1.0)
    )
    assert narrow.effort == PAIR_COST * 8 * 512 * 512
    assert written_out.effort < narrow.effort, "what is written out counts none of the kernel's pairs"


def test_each_call_of_a_kernel_costs() -> None:
    def calls(message: pb.AttendRequest) -> float:
        request = messages.read(message)
        return (request.extent.cost - request.effort) / CALL_COST

    slopes, padded = np.ones(8, np.float32), {"kv_length": 4, "batch": 4, "width": 64, "heads": 8}
    assert calls(messages.random_attend(0, 3, **padded)) == 0, "any number of such requests is one call"
    assert calls(messages.random_attend(0, 3, alibi_slopes=slopes, **padded)) == 1
    assert calls(messages.random_attend(0, 3, kv_lengths=ints(1, 4, 2, 2), **padded)) == 3
    rows = np.zeros((7, 4, 64), np.float32)
    lengths = {"query_lengths": ints(1, 3, 2, 1), "kv_lengths": ints(1, 2, 2, 2)}
    assert calls(messages.attend(rows, rows, rows, layout=pb.LAYOUT_PACKED, **lengths)) == 4


def test_what_has_no_queries_costs_nothing() -> None:
    assert messages.read(messages.random_attend(0, 0, kv_length=3, batch=1 << 10, heads=16)).extent.cost == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("stage", [pb.SCORE_STAGE_UNSPECIFIED, pb.SCORE_STAGE_WEIGHTS])
def test_reply_bytes(dtype: Any, return_lse: bool, stage: int) -> None:
    message = messages.random_attend(
        0, 3, kv_length=5, batch=2, heads=4, kv_heads=1, dtype=dtype, return_lse=return_lse, return_scores=stage
    )
    itemsize = np.dtype(dtype).itemsize
    rows = 2 * 4 * 3
    expected = rows * 8 * itemsize
    if return_lse:
        expected += rows * (8 if dtype == np.float64 else 4)
    if stage:
        expected += rows * 5 * itemsize
    request = messages.read(message)
    assert request.extent.reply_bytes == expected
    assert request.extent.query_tokens == 2 * 3
    assert request.received_bytes == message.ByteSize()


def test_the_reply_bytes_of_packed_scores_are_those_of_the_longest_keys() -> None:
    request = messages.read(packed(ints(3, 4), ints(2, 3), return_scores=pb.SCORE_STAGE_RAW))
    assert request.extent.reply_bytes == 7 * 4 * (8 + 3) * 4


def test_requests_of_any_shape_and_options_can_be_one_batch_but_those_written_out_are_by_themselves() -> None:
    plain = [{}, {"causal": True}, {"kv_heads": 2, "heads": 4}, {"mask": np.ones((3, 3), bool)}, {"dtype": np.float64}]
    written_out = [{"softcap": 2.0}, {"return_scores": pb.SCORE_STAGE_RAW}]
    (together,), (apart,) = (
        {messages.read(messages.random_attend(0, 3, **fields)).group for fields in kinds}
        for kinds in (plain, written_out)
    )
    assert together != apart


def test_payloads_are_views_of_what_was_received() -> None:
    message = messages.random_attend(0, 3, kv_length=5)
    buffer = b"before" + message.SerializeToString() + b"behind"
    request = messages.read_request(buffer, 6, len(buffer) - 6)
    for name in ("query", "key", "value"):
        payload = request.payload(name)
        assert payload.obj is buffer
        assert bytes(payload) == getattr(message, name).data
    assert request.received_bytes == len(buffer) - 12


def test_an_empty_tensor_has_an_empty_payload() -> None:
    request = messages.read(messages.random_attend(0, 3, kv_length=0))
    assert bytes(request.payload("key")) == b""


plans = st.fixed_dictionaries(
    {
        "length": st.integers(0, 3),
        "kv_length": st.integers(0, 3),
        "batch": st.integers(1, 2),
        "heads": st.integers(1, 2),
        "dtype": st.sampled_from([np.float32, np.float16]),
        "causal": st.booleans(),
        "return_lse": st.booleans(),
        "priority": st.integers(-1, 1),
        "layout": st.sampled_from([pb.LAYOUT_UNSPECIFIED, pb.LAYOUT_HEADS_FIRST]),
        "scale": st.sampled_from([0.0, 1.0, 2.0]),
        "alignment": st.sampled_from([pb.ALIGNMENT_TOP_LEFT, pb.ALIGNMENT_BOTTOM_RIGHT]),
    }
)


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(plans, min_size=2, max_size=6), st.data())
def test_headers_seen_before_are_not_mixed_up(drawn: list[dict[str, Any]], data: st.DataObject) -> None:
    """Requests of many shapes, repeated in any order: each is read as if it were the first."""
    for seed in range(3 * len(drawn)):
        plan = data.draw(st.sampled_from(drawn))
        message = messages.random_attend(seed, **plan)
        request = messages.read(message)
        problem = request.problem
        heads, keys = plan["heads"], plan["kv_length"]
        assert problem.tensors["query"].shape == (plan["batch"], heads, plan["length"], 8)
        assert (problem.kv_length, problem.scale, request.priority) == (keys, plan["scale"], plan["priority"])
        assert (problem.window[1], problem.return_lse) == (0 if plan["causal"] else -1, plan["return_lse"])
        bottom_right = plan["causal"] and plan["alignment"] == pb.ALIGNMENT_BOTTOM_RIGHT
        offset = keys - plan["length"] if bottom_right else 0
        assert [span.offset for span in request.spans] == [offset]
        assert problem.dtype == messages.tensor(np.zeros(0, plan["dtype"])).dtype
        for name in ("query", "key", "value"):
            assert bytes(request.payload(name)) == getattr(message, name).data


def test_lengths_are_read_anew_from_equal_headers() -> None:
    one, other = (messages.random_attend(0, 3, batch=2, kv_lengths=lengths) for lengths in (ints(3, 1), ints(0, 2)))
    lengths = [[span.kv_length for span in messages.read(message).spans] for message in (one, other, one)]
    assert lengths == [[3, 1], [0, 2], [3, 1]]


def test_lengths_may_come_before_queries() -> None:
    rest = messages.random_attend(0, 3, batch=2)
    lengths = pb.AttendRequest(kv_lengths=messages.tensor(ints(3, 1)))
    request = messages.read_request(lengths.SerializeToString() + rest.SerializeToString())
    assert [span.kv_length for span in request.spans] == [3, 1]
    assert bytes(request.payload("query")) == rest.query.data


def test_a_broken_request_is_broken_again() -> None:
    message = messages.random_attend(0, priority=9)
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            messages.read(message)


def test_long_headers_of_unknown_fields_do_not_stay_in_memory() -> None:
    message = messages.random_attend(0).SerializeToString()
    known = rooms._known.cache_info().currsize
    for number in range(3):
        unknown = b"\xfa\x3f\xd0\x0f" + bytes([number]) * 2000  # field 1023, 2000 bytes
        one, other = (messages.read_request(each).problem for each in (message + unknown, message))
        assert asdict(one) == asdict(other)
    assert rooms._known.cache_info().currsize <= known + 1


def test_a_tensor_given_in_parts_is_the_merger_of_them() -> None:
    whole = messages.random_attend(0, 3)
    parts = pb.AttendRequest(query=tensor_pb2.Tensor(dtype=whole.query.dtype)), pb.AttendRequest()
    parts[1].CopyFrom(whole)
    parts[1].query.ClearField("dtype")
    request = messages.read_request(parts[0].SerializeToString() + parts[1].SerializeToString())
    assert bytes(request.payload("query")) == whole.query.data
    assert asdict(request.problem) == asdict(messages.read(whole).problem)
