"""Arrays on their way out and back: dtypes, byte orders, strides, copies, torch."""

from __future__ import annotations

import decimal
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve import InvalidRequestError, ProtocolError, _dtypes
from attnserve._requests import arrays
from attnserve.v1 import tensor_pb2 as pb

torch = pytest.importorskip("torch")

FLOATS = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16]
MASKED = np.ma.masked_equal(np.ones((2, 3), np.float32), 1)
TORCH_FLOATS = [torch.float32, torch.float16, torch.float64, torch.bfloat16]


def elements(array: arrays.Array) -> np.ndarray[Any, Any]:
    """The array as a receiver reads it."""
    return np.frombuffer(b"".join([array.data]), _dtypes.NUMPY[array.dtype]).reshape(array.shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)])
def test_floats_travel_as_they_are(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    sent = arrays.floating("query", array)
    assert (_dtypes.NUMPY[sent.dtype], sent.shape) == (array.dtype, shape)
    np.testing.assert_array_equal(elements(sent), array)


@pytest.mark.parametrize("dtype", FLOATS)
def test_contiguous_arrays_are_not_copied(dtype: Any) -> None:
    array = np.ones((2, 3, 4), dtype)
    assert np.shares_memory(np.frombuffer(arrays.floating("query", array).data, np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_strided_arrays_are_packed(dtype: Any) -> None:
    array = np.arange(48).reshape(2, 4, 6).astype(dtype)
    for strided in (array.transpose(2, 0, 1), array[:, ::2], array[..., ::-1], np.broadcast_to(array[:1], array.shape)):
        np.testing.assert_array_equal(elements(arrays.floating("query", strided)), strided)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_big_endian_floats_are_converted(dtype: str) -> None:
    array = np.array([1.5, -2.25, 3e4], dtype)
    np.testing.assert_array_equal(elements(arrays.floating("query", array)), array)


def test_plain_numbers_become_float32() -> None:
    for value in (1, 0.5, [1, 2], [[0.5], [0.25]], (1.0, 2)):
        sent = arrays.floating("bias", value)
        assert sent.dtype == pb.DATA_TYPE_FLOAT32
        np.testing.assert_array_equal(elements(sent), np.array(value, np.float32))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [arrays.floating, arrays.floating_or_ids])
def test_arrays_in_lists_keep_their_dtype(make: Any, dtype: Any) -> None:
    rows = [np.ones((2, 3), dtype), np.zeros((2, 3), dtype)]
    together = np.stack(rows)
    for nested in (rows, tuple(rows), [list(row) for row in rows], [[list(each) for each in row] for row in rows]):
        array = make("query", nested)
        assert (array.dtype, array.shape) == (make("query", together).dtype, (2, 2, 3))
        assert bytes(array.data) == together.tobytes()
    assert make("query", rows[0][0, 0]).dtype == make("query", together).dtype
    assert make("query", [np.empty((0, 4), dtype)]).dtype == make("query", together).dtype


def test_integers_in_lists_become_float32_whosever_they_are() -> None:
    for value in ([np.int64(1), 2], [np.uint8(1)], [np.array([1, 2])]):
        assert arrays.floating("bias", value).dtype == pb.DATA_TYPE_FLOAT32


def test_numbers_of_numpys_keep_their_dtype() -> None:
    """Even float64, whose scalars are also Python floats."""
    assert arrays.floating("bias", np.float64(0.1)).dtype == pb.DATA_TYPE_FLOAT64
    assert arrays.floating("bias", np.float16(0.1)).dtype == pb.DATA_TYPE_FLOAT16


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.uint8, "U3", object])
def test_what_is_not_floating_is_refused(dtype: Any) -> None:
    with pytest.raises(InvalidRequestError, match="bias: expected float32") as caught:
        arrays.floating("bias", np.ones(3).astype(dtype))
    assert caught.value.field == "bias"


@pytest.mark.parametrize("value", [[[1.0], [1.0, 2.0]], [object()]])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        arrays.floating("key", value)
    assert caught.value.field == "key"


@pytest.mark.parametrize(
    ("value", "found"), [(None, "None"), (MASKED, "a masked array"), ([np.ones((2, 3)), MASKED], "a masked array")]
)
def test_what_is_left_out_or_masked_is_refused_as_such(value: Any, found: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"key: expected an array or a tensor, found {found}"):
        arrays.floating("key", value)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int64, np.uint64])
def test_equal_masks_of_any_dtype_are_the_same_bytes(dtype: Any) -> None:
    mask = np.array([[1, 0, 1], [0, 0, 1]], dtype)
    sent = arrays.boolean("mask", mask)
    assert (sent.dtype, bytes(memoryview(sent.data).cast("B"))) == (pb.DATA_TYPE_BOOL, b"\1\0\1\0\0\1")
    assert arrays.boolean("mask", mask.tolist()) == sent
    assert arrays.boolean("mask", torch.tensor(mask.astype(np.int64))) == sent
    assert arrays.boolean("mask", torch.tensor(mask.astype(bool))) == sent


@pytest.mark.parametrize("value", [np.array([0, 2]), np.array([-1, 0])])
def test_integer_masks_hold_0_and_1_only(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="only 0 and 1"):
        arrays.boolean("mask", value)


@pytest.mark.parametrize("value", [np.zeros(2, np.float32), [0.0, 1.0], torch.zeros(2), torch.zeros(2).bfloat16()])
def test_a_float_mask_is_refused_and_bias_named(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="bias") as caught:
        arrays.boolean("mask", value)
    assert caught.value.field == "mask"


@pytest.mark.parametrize("value", [[3, 4], np.array([3, 4], np.uint8), np.array([3, 4], ">i2"), torch.tensor([3, 4])])
def test_integers_become_int64(value: Any) -> None:
    sent = arrays.integers("kv_lengths", value)
    assert sent.dtype == pb.DATA_TYPE_INT64
    np.testing.assert_array_equal(elements(sent), [3, 4])


@pytest.mark.parametrize("value", [[1.5], True, [True], np.array([2**63], np.uint64), "3", [2**70]])
def test_what_is_not_int64_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        arrays.integers("kv_lengths", value)
    assert caught.value.field == "kv_lengths"


@pytest.mark.parametrize(
    "value",
    [
        [3, 4],
        (3, 4),
        np.array([3, 4], np.uint8),
        np.array([3, 4], ">i4"),
        torch.tensor([3, 4], dtype=torch.int32),
        torch.tensor([3, 4]),
    ],
)
def test_integers_where_either_may_be_are_ids(value: Any) -> None:
    sent = arrays.floating_or_ids("input", value)
    assert (sent.dtype, sent.shape) == (pb.DATA_TYPE_INT64, (2,))
    np.testing.assert_array_equal(elements(sent), [3, 4])


def test_no_ids_are_still_ids() -> None:
    assert arrays.floating_or_ids("input", []).dtype == pb.DATA_TYPE_INT64
    assert arrays.floating_or_ids("input", np.zeros((0, 4), np.float16)).dtype == pb.DATA_TYPE_FLOAT16


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_where_either_may_be_travel_as_they_are(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    assert arrays.floating_or_ids("input", array) == arrays.floating("input", array)


def test_fractions_where_either_may_be_become_float32() -> None:
    for value in ([0.5, 2], [[1.0]], 0.25):
        assert arrays.floating_or_ids("input", value) == arrays.floating("input", value)
        assert arrays.floating_or_ids("input", value).dtype == pb.DATA_TYPE_FLOAT32


@pytest.mark.parametrize("value", [np.ones(2, bool), [True], "text", torch.ones(2, dtype=torch.complex64), [2**70]])
def test_what_is_neither_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"input: expected .* or integers, found") as caught:
        arrays.floating_or_ids("input", value)
    assert caught.value.field == "input"


@pytest.mark.parametrize("dtype", TORCH_FLOATS)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3, 4)])
def test_torch_there_and_back(dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    with torch.no_grad():
        sent = arrays.floating("query", tensor)
    array = arrays.from_wire("output", sent.dtype, sent.shape, b"".join([sent.data]))
    back = arrays.to_torch(array, tensor.device)
    assert back.dtype is dtype
    assert torch.equal(back, tensor.detach())


def test_gradients_are_not_lost_unnoticed() -> None:
    parameter = torch.ones(2, 3, requires_grad=True)
    for tensor in (parameter, 2 * parameter):
        with pytest.raises(InvalidRequestError, match=r"query: .* requires no gradient.*no_grad") as caught:
            arrays.floating("query", tensor)
        assert caught.value.field == "query"
        arrays.floating("query", tensor.detach())
    with torch.inference_mode():
        arrays.floating("query", parameter)


@pytest.mark.parametrize("dtype", TORCH_FLOATS)
def test_torch_tensors_are_not_copied_where_contiguous(dtype: Any) -> None:
    tensor = torch.ones(2, 3, dtype=dtype)
    data = np.frombuffer(arrays.floating("query", tensor).data, np.uint8)
    assert data.ctypes.data == tensor.data_ptr()
    np.testing.assert_array_equal(elements(arrays.floating("query", tensor.T)), np.ones((3, 2)))


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex64)]
)
def test_torch_tensors_that_cannot_travel_are_refused(tensor: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        arrays.floating("query", tensor)
    assert caught.value.field == "query"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: torch.ones(2).to(torch.float8_e4m3fn),
            "found torch.float8_e4m3fn; float32, float16, bfloat16, float64,",
        ),
        (lambda: torch.ones(2, device="meta"), "found a tensor on the device meta, which has no elements"),
        (lambda: torch.ones(2).to_sparse(), "found a tensor of layout torch.sparse_coo; dense ones"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "found a nested tensor; dense ones",
        ),
    ],
)
@pytest.mark.parametrize("read", [arrays.floating, arrays.floating_or_ids, arrays.boolean, arrays.integers])
def test_what_cannot_be_sent_of_torch_is_told_by_dtype_and_layout(read: Any, make: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^query: expected an array or a tensor, {told}"):
        read("query", make())


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (2**70, "found 1180591620717411303424, which exceeds 64 bits"),
        ([1, -(2**70)], "found -1180591620717411303424, which exceeds 64 bits"),
        ([10**5000], "found an integer, which exceeds 64 bits"),
        ("text", "found text"),
        (b"bytes", "found bytes"),
        ([b"bytes"], "found bytes"),
        ([1, None], "found Python objects: NoneType, int"),
    ],
)
@pytest.mark.parametrize("read", [arrays.floating, arrays.floating_or_ids, arrays.boolean, arrays.integers])
def test_what_there_is_instead_of_numbers_is_told(read: Any, value: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^query_offset: expected .*, {told}"):
        read("query_offset", value)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: (n for n in range(3)), "generator"),
        (lambda: {1, 2}, "set"),
        (lambda: {1: 2}, "dict"),
        (lambda: st.integers, "function"),
        (object, "object"),
        (lambda: decimal.Decimal(1), "decimal.Decimal"),
    ],
)
@pytest.mark.parametrize("read", [arrays.floating, arrays.floating_or_ids, arrays.boolean, arrays.integers])
def test_what_is_no_array_is_told_by_its_type(read: Any, make: Any, kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^query: expected an array or a tensor, found {kind}$"):
        read("query", make())


class Elsewhere:
    """An array of a library that shows its arrays by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_arrays_of_other_libraries_come_by_dlpack(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for each in (array, array.T):
        sent = arrays.floating("query", Elsewhere(each))
        assert sent.dtype == _dtypes.WIRE[np.dtype(dtype)]
        np.testing.assert_array_equal(elements(sent), each)
    data = np.frombuffer(arrays.floating("query", Elsewhere(array)).data, np.uint8)
    assert np.shares_memory(data, array.view(np.uint8))
    assert arrays.integers("kv_lengths", Elsewhere(np.array([3, 4]))) == arrays.integers("kv_lengths", [3, 4])


def test_what_numpy_cannot_have_by_dlpack_is_refused() -> None:
    for each in (Elsewhere(torch.ones(2).bfloat16()), Elsewhere(None)):
        with pytest.raises(InvalidRequestError, match=r"query: expected an array or a tensor, found .*Elsewhere: "):
            arrays.floating("query", each)


@given(st.integers(0, 7), st.sampled_from([(), (5,), (2, 3), (0, 4)]), st.sampled_from(FLOATS))
def test_replies_become_arrays_of_their_own(offset: int, shape: tuple[int, ...], dtype: Any) -> None:
    expected = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    buffer = bytes(offset) + expected.tobytes()
    array = arrays.from_wire("output", _dtypes.WIRE[expected.dtype], shape, memoryview(buffer)[offset:])
    np.testing.assert_array_equal(array, expected)
    assert array.flags.writeable
    assert array.flags.aligned
    assert array.dtype == expected.dtype


@pytest.mark.parametrize(
    ("dtype", "shape", "length"),
    [
        (pb.DATA_TYPE_FLOAT32, (2, 2), 15),
        (pb.DATA_TYPE_FLOAT32, (-1, -4), 16),
        (pb.DATA_TYPE_FLOAT32, (0, 2**62, 2**62), 0),
        (0, (4,), 16),
        (99, (4,), 16),
    ],
)
def test_replies_that_contradict_themselves_are_told(dtype: int, shape: tuple[int, ...], length: int) -> None:
    with pytest.raises(ProtocolError, match="output"):
        arrays.from_wire("output", dtype, shape, bytes(length))
