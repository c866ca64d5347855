"""Arguments that operations have in common: their types, the meanings of keywords, and their checks.

In: what the caller passed. Out: what goes into a message, or an `InvalidRequestError` with the field's name. Only what
needs no knowledge of attention is checked here. The server is the authority on the rest.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Number
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from attnserve._errors import InvalidRequestError
from attnserve._numbers import real, shown, whole
from attnserve._requests import arrays
from attnserve._requests.arrays import Array
from attnserve._settings.targets import check_address
from attnserve.v1 import attention_pb2 as pb

ArrayT = TypeVar("ArrayT")
"""The type of a result's arrays."""

KindT = TypeVar("KindT", default=NDArray[Any])
"""The same, as type checkers infer it from the query or the input: a torch tensor; or a NumPy array of any dtype, since
the arrays of a result may have several. Numbers in lists give a NumPy array.
"""

_KindT_co = TypeVar("_KindT_co", covariant=True)


class _Tensor(Protocol[_KindT_co]):
    """By this method, type checkers recognise a torch tensor without torch. A `torch.nn.Parameter` detaches to a plain
    tensor, and that is what a call returns for it.
    """

    def detach(self) -> _KindT_co: ...


class _NumPy(Protocol[_KindT_co]):
    """By this property, type checkers recognise a NumPy array. Its base is an array of any dtype and shape."""

    @property
    def base(self) -> _KindT_co | None: ...


ArrayOf: TypeAlias = _Tensor[KindT] | _NumPy[KindT] | Sequence[Any] | float
"""A NumPy array, a torch tensor, or numbers in lists. The result has arrays of type `KindT`.

Type checkers infer `KindT` only if no value fits two of the alternatives. So there is none for all that NumPy can make
an array of (`__array__`): tensors would fit it, too. Type checkers refuse such other arrays; callers convert them, or
declare them as ``Any``.
"""

ArrayLike: TypeAlias = ArrayOf[Any]
"""The same where the result does not depend on its type."""

Names: TypeAlias = str | Iterable[str]
"""One name or several."""

Causal: TypeAlias = bool | Literal["top_left", "bottom_right"]
Scores: TypeAlias = Literal["raw", "capped", "masked", "weights"]

ALIGNMENTS: Final[dict[Any, tuple[bool, pb.Alignment]]] = {
    None: (False, pb.ALIGNMENT_UNSPECIFIED),
    False: (False, pb.ALIGNMENT_UNSPECIFIED),
    True: (True, pb.ALIGNMENT_TOP_LEFT),
    "top_left": (True, pb.ALIGNMENT_TOP_LEFT),
    "bottom_right": (True, pb.ALIGNMENT_BOTTOM_RIGHT),
}
"""The values of `causal`: whether there is a causal mask, and how it is aligned."""

RESIDENT_ALIGNMENTS: Final = {**ALIGNMENTS, True: (True, pb.ALIGNMENT_UNSPECIFIED)}
"""The values of `causal` with resident caches, for which servers take an unset alignment as bottom right."""

STAGES: Final[dict[Any, pb.ScoreStage]] = {
    None: pb.SCORE_STAGE_UNSPECIFIED,
    "raw": pb.SCORE_STAGE_RAW,
    "capped": pb.SCORE_STAGE_CAPPED,
    "masked": pb.SCORE_STAGE_MASKED,
    "weights": pb.SCORE_STAGE_WEIGHTS,
}
"""The values of `return_scores`."""

_KEYWORDS: Final = (int, str, type(None))
"""The types of keywords. They are looked for first: to ask whether a value is a number takes three times as long."""


class Hint(NamedTuple):
    """What is said to whoever uses the name that an option has in another library."""

    text: str
    option: str | None = None
    """The option that the text recommends."""


_MASK: Final = Hint("'mask' is one, true where a query attends a key; what is added to the scores is 'bias'", "mask")
_DROPOUT: Final = Hint("there is no dropout here")
_WEIGHTS: Final = Hint("return_scores='weights' returns them", "return_scores")

NAMES_ELSEWHERE: Final = {
    "attention_mask": _MASK,
    "attn_mask": _MASK,
    "key_padding_mask": _MASK,
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "enable_gqa": Hint("heads are grouped by their numbers alone"),
    "is_causal": Hint("'causal' is one", "causal"),
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "scaling": Hint("'scale' is one", "scale"),
    "sliding_window": Hint("'window' is one, (left, right) without the query's own position", "window"),
    "softmax_scale": Hint("'scale' is one", "scale"),
}
"""The names that torch, transformers and others have for options, and what is said to whoever uses them. A guess by
spelling, as for other unknown names, would find nothing here, or the wrong option.
"""


OF_A_LAYER: Final = {
    name: Hint(f"the layer defines its {name}") for name in ("alibi_slopes", "scale", "sinks", "softcap")
}
"""The same for applying layers."""

OF_A_CACHE: Final = {
    "cache_layer": Hint("'layer' is one"),
    "caches": Hint("this cache is the one that is attended to"),
}
"""The same for methods of a cache."""

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def takes_options(options: type[Mapping[str, Any]], encode: Callable[..., Any]) -> Callable[[MethodT], MethodT]:
    """For a method that hands its `**options` to `encode`: lists them in its signature, with their defaults, for `help`
    and for tools that complete names.
    """
    names: frozenset[str] = options.__optional_keys__  # type: ignore[attr-defined]
    named = [parameter for name, parameter in inspect.signature(encode).parameters.items() if name in names]

    def listed(method: MethodT) -> MethodT:
        own = inspect.signature(method)
        others = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        method.__signature__ = own.replace(parameters=[*others, *named])  # type: ignore[attr-defined]
        return method

    return listed


def check_options(
    method: str,
    options: Mapping[str, Any],
    known: type[Mapping[str, Any]],
    *others: str,
    hints: Mapping[str, Hint] = MappingProxyType({}),
) -> None:
    """TypeError, as if from the called method, if it does not have one of the options; `others` are further arguments
    that may have been meant, `hints` what is said to whoever uses these names.
    """
    names: frozenset[str] = known.__optional_keys__  # type: ignore[attr-defined]
    if not options.keys() <= names:
        unknown = min(options.keys() - names)
        hint = ""
        if found := hints.get(unknown) or NAMES_ELSEWHERE.get(unknown):
            is_taken = found.option is None or found.option in names
            hint = found.text if is_taken else f"the layer defines its {found.option}"
        elif meant := difflib.get_close_matches(unknown, [*names, *others], 1):
            hint = f"{meant[0]!r} is one"
        raise TypeError(f"{method}() got an unexpected keyword argument {unknown!r}{hint and f'; {hint}'}")


def check_no_layer(cache_layer: int) -> None:
    """InvalidRequestError for a layer of caches where there are none."""
    if integer("cache_layer", cache_layer, 64) != 0:
        raise InvalidRequestError(
            f"cache_layer: expected caches to go with it, found none, and {shown(cache_layer)}", field="cache_layer"
        )


def choice(field: str, choices: dict[Any, Any], value: Any) -> Any:
    """The meaning of a keyword, looked up in `choices`."""
    try:
        if not isinstance(value, _KEYWORDS) and isinstance(value, (Number, np.number)):
            raise KeyError  # 1.0 would be found as True; so is 1, but that is allowed, as in `flag`
        return choices[value]
    except (KeyError, TypeError):
        expected = ", ".join(map(repr, choices))
        raise InvalidRequestError(f"{field}: expected one of {expected}, found {shown(value)}", field=field) from None


def number(field: str, value: Any) -> float:
    """A number of any type, as a float."""
    try:
        return real(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"{field}: expected a number, found {shown(value)}", field=field) from None


def flag(field: str, value: Any) -> bool:
    """True or False, also NumPy's, or 0 or 1. Nothing else: Python takes any text for true, even "false"."""
    if value is True or value is False:
        return value
    if isinstance(value, int | np.bool_) and value in (0, 1):
        return bool(value)
    raise InvalidRequestError(f"{field}: expected True or False, found {shown(value)}", field=field)


def integer(field: str, value: Any, bits: int) -> int:
    """An integer of any type that fits into a signed integer of `bits` bits."""
    try:
        index = whole(value)
    except TypeError:
        raise InvalidRequestError(f"{field}: expected an integer, found {shown(value)}", field=field) from None
    if not -(1 << bits - 1) <= index < 1 << bits - 1:
        raise InvalidRequestError(f"{field}: expected an integer of {bits} bits, found {shown(index)}", field=field)
    return index


def count(field: str, value: Any, least: int, bits: int) -> int:
    """An integer of any type, at least `least` and less than 2 to the power of `bits`."""
    index = integer(field, value, 64)
    if not least <= index < 1 << bits:
        expected = f"an integer of {least} or more" if index < least else f"an integer below 2**{bits}"
        raise InvalidRequestError(f"{field}: expected {expected}, found {index}", field=field)
    return index


def window(value: Any) -> tuple[int, int] | None:
    """A sliding window ``(left, right)``; None for none."""
    if value is None:
        return None
    try:
        if isinstance(value, Set | Mapping):
            raise TypeError("there is no first and no second")
        left, right = value
    except (TypeError, ValueError):
        raise InvalidRequestError(f"window: expected (left, right), found {shown(value)}", field="window") from None
    return integer("window.left", left, 64), integer("window.right", right, 64)


def lengths(field: str, value: Any) -> Array:
    """The lengths of sequences, ``[B]``; a single integer is the length of one sequence."""
    array = arrays.integers(field, value)
    return array if array.shape else array._replace(shape=(1,))


def text(field: str, value: Any) -> str:
    """A name or a path, which must not be empty."""
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{field}: expected a string that is not empty, found {shown(value)}", field=field)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            expected = "what UTF-8 can say"
            raise InvalidRequestError(f"{field}: expected {expected}, found {shown(value)}", field=field) from None
    return value


def address(field: str, value: Any) -> str:
    """The address of one server."""
    try:
        check_address(text(field, value))
    except ValueError as error:
        raise InvalidRequestError(str(error), field=field) from None
    return str(value)


def names(field: str, values: Names) -> list[str]:
    """The names as a list; none may be empty."""
    if isinstance(values, str):
        values = (values,)
    elif not isinstance(values, Iterable):
        raise InvalidRequestError(f"{field}: expected a name or several, found {shown(values)}", field=field)
    return [text(field, value) for value in values]
