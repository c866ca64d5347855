"""The caller's arrays in the wire's form, and back.

In: NumPy arrays of any byte order and stride, torch tensors of any device, other libraries' arrays (by NumPy's own
protocols or DLPack), numbers and lists of them. Out: `Array`, a dtype of the wire, a shape and a view of the elements
(packed, C-order, little-endian). Data already in this form is not copied. Back: from a reply's tensor to an array of
the caller's kind, in memory of its own.

torch is never imported: a caller that has a tensor has imported it.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from attnserve import _dtypes
from attnserve._errors import InvalidRequestError, ProtocolError
from attnserve._fields import Buffer
from attnserve.v1 import tensor_pb2 as pb

_INT64: Final = np.dtype("<i8")
_BFLOAT16: Final = _dtypes.NUMPY[pb.DATA_TYPE_BFLOAT16]


class Array(NamedTuple):
    """A tensor that is ready to send."""

    dtype: int
    """A value of the protocol's `DataType`."""
    shape: tuple[int, ...]
    """The length of each axis."""
    data: Buffer
    """The elements: a view of the caller's memory if possible."""


def torch_tensor(value: Any) -> Any | None:
    """The value if it is a torch tensor, else None."""
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", None)  # None while another thread is still importing torch
    return value if tensor_type is not None and isinstance(value, tensor_type) else None


def floating(field: str, value: Any) -> Array:
    """A floating tensor. Plain numbers, also in lists, and integers in lists become float32. InvalidRequestError for
    any other dtype.
    """
    array = _as_numpy(field, value)
    whole = array.dtype.kind in "iu" and isinstance(value, list | tuple)
    if array is not value and (whole or (array.dtype.kind in "fiu" and _is_plain(value))):
        array = array.astype(np.float32)
    return _floating(field, array, "float32, float16, bfloat16 or float64")


def floating_or_ids(field: str, value: Any) -> Array:
    """A floating tensor, or an int64 tensor for integers and for empty lists.

    Plain floats in lists become float32. InvalidRequestError for any other dtype.
    """
    array = _as_numpy(field, value)
    plain = _is_plain(value)
    if array.dtype.kind in "iu" or (plain and array.size == 0):
        return _integers(field, array)
    if plain and array.dtype.kind == "f":
        array = array.astype(np.float32)
    return _floating(field, array, "float32, float16, bfloat16, float64 or integers")


def boolean(field: str, value: Any) -> Array:
    """A boolean tensor, true means attend. Integers are accepted if they are all 0 or 1."""
    array = _as_numpy(field, value)
    if array.dtype.kind in "iu":
        if array.size and not (array.min() >= 0 and array.max() <= 1):
            raise InvalidRequestError(f"{field}: expected only 0 and 1 in an integer mask, found others", field=field)
        array = array.astype(np.bool_)
    elif array.dtype.kind != "b":
        raise InvalidRequestError(
            f"{field}: expected bool, true where a query attends a key, found {_found(array)}; "
            "what is to be added to the scores is a bias",
            field=field,
        )
    return _packed(pb.DATA_TYPE_BOOL, array)


def integers(field: str, value: Any) -> Array:
    """An int64 tensor, from an integer or integers."""
    array = _as_numpy(field, value)
    if array.dtype.kind not in "iu" and not (array.size == 0 and _is_plain(value)):
        raise InvalidRequestError(f"{field}: expected integers, found {_found(array)}", field=field)
    return _integers(field, array)


def _floating(field: str, array: np.ndarray[Any, Any], expected: str) -> Array:
    dtype = _dtypes.WIRE.get(array.dtype)
    if dtype is None:
        array = _little_endian(array)
        dtype = _dtypes.WIRE.get(array.dtype)
    if dtype is None or dtype not in _dtypes.FLOATING:
        raise InvalidRequestError(f"{field}: expected {expected}, found {_found(array)}", field=field)
    return _packed(dtype, array)


def _integers(field: str, array: np.ndarray[Any, Any]) -> Array:
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidRequestError(f"{field}: expected 64-bit signed integers, found {array.max()}", field=field)
    return _packed(pb.DATA_TYPE_INT64, array.astype(_INT64, copy=False))


def _is_plain(value: Any) -> bool:
    """Whether a value consists of Python's own numbers, which have no dtype. Only the first one is looked at."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, int | float | list | tuple) and not isinstance(value, np.generic)


def _as_numpy(field: str, value: Any) -> np.ndarray[Any, Any]:
    if type(value) is np.ndarray:
        return value
    tensor = torch_tensor(value)
    if tensor is not None and tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise InvalidRequestError(
            f"{field}: expected a tensor that requires no gradient, for none comes back; detach it, or "
            "call under torch.no_grad()",
            field=field,
        )
    if value is None:
        raise InvalidRequestError(f"{field}: expected an array or a tensor, found None", field=field)
    try:
        if tensor is not None:
            return _torch_as_numpy(tensor)
        by_dlpack = hasattr(value, "__dlpack__") and not hasattr(value, "__array__")
        array: np.ndarray[Any, Any] = np.from_dlpack(value) if by_dlpack else np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError, BufferError, AttributeError) as error:
        found = f"{_kind(value)}: {error}" if tensor is None else _unreadable(tensor, error)
        raise InvalidRequestError(f"{field}: expected an array or a tensor, found {found}", field=field) from error
    if array.dtype == object and not array.ndim and not isinstance(value, int):
        raise InvalidRequestError(f"{field}: expected an array or a tensor, found {_kind(value)}", field=field)
    if _has_mask(value):
        found = "a masked array, of whose mask nobody would know"
        raise InvalidRequestError(f"{field}: expected an array or a tensor, found {found}", field=field)
    return array


def _has_mask(value: Any) -> bool:
    """Whether a value is a masked array, or lists with some, which NumPy joins without their masks."""
    if isinstance(value, list | tuple):
        return bool(value) and not isinstance(value[0], int | float) and any(map(_has_mask, value))
    return isinstance(value, np.ma.MaskedArray)


def _kind(value: Any) -> str:
    """The name of a value's type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _found(array: np.ndarray[Any, Any]) -> str:
    """What an array has instead of the dtype that was expected, in words."""
    if array.dtype != object:
        return {"S": "bytes", "U": "text"}.get(array.dtype.kind, str(array.dtype))
    for element in array.flat:
        if isinstance(element, int) and not -(2**63) <= element < 2**64:
            return f"{element if element.bit_length() < 1000 else 'an integer'}, which exceeds 64 bits"
    return f"Python objects: {', '.join(sorted({_kind(element) for element in array.flat})[:3])}"


def _unreadable(tensor: Any, error: Exception) -> str:
    """What is wrong with a torch tensor that NumPy cannot have."""
    torch = sys.modules["torch"]
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        return f"{layout}; dense ones (torch.strided) can be sent"
    if tensor.device.type == "meta":
        return "a tensor on the device meta, which has no elements to send"
    if isinstance(error, TypeError):
        return f"{tensor.dtype}; float32, float16, bfloat16, float64, integers and bool can be sent"
    return f"{_kind(tensor)}: {error}"


def _torch_as_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """A torch tensor as a NumPy array, without a copy if it is in CPU memory and needs no conversion."""
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        array: np.ndarray[Any, Any] = tensor.view(torch.int16).numpy().view(_BFLOAT16)
    else:
        array = tensor.numpy()
    return array


def _little_endian(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def _packed(dtype: int, array: np.ndarray[Any, Any]) -> Array:
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    # The buffer protocol does not support bfloat16.
    return Array(dtype, array.shape, (array if dtype != pb.DATA_TYPE_BFLOAT16 else array.view(np.uint16)).data)


def from_wire(field: str, dtype: int, shape: tuple[int, ...], data: Buffer) -> np.ndarray[Any, Any]:
    """A copy of a reply's tensor as an array, aligned and writable. ProtocolError if the tensor is inconsistent."""
    numpy_dtype = _dtypes.NUMPY.get(dtype)
    if numpy_dtype is None:
        raise ProtocolError(f"{field}: the server replied with dtype {_dtypes.name(dtype)}")
    length = len(data)
    if prod(shape) * numpy_dtype.itemsize != length or (shape and min(shape) < 0):
        raise ProtocolError(f"{field}: the server replied with {length} bytes for {numpy_dtype} {list(shape)}")
    try:
        elements: np.ndarray[Any, Any] = np.ndarray(shape, numpy_dtype, data)
    except ValueError as error:  # an empty array whose other axes are too long
        raise ProtocolError(f"{field}: the server replied with shape {list(shape)}") from error
    # The payload may be unaligned, and shares its memory with other replies.
    return elements.copy()


def to_torch(array: np.ndarray[Any, Any], device: Any) -> Any:
    """An array as a torch tensor on a device; on the CPU it shares the array's memory."""
    torch = sys.modules["torch"]
    if array.dtype == _BFLOAT16:
        result = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        result = torch.from_numpy(array)
    return result.to(device)
