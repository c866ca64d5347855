"""What an operation on caches sends, step by step, and what follows from the replies. No I/O: both clients carry out
the same plans (`transaction`).

In: caches, and arguments as the caller passed them. Out: a `Plan`, whose steps are a generator: it yields requests, is
sent their results or thrown their errors, and returns what the caller gets.

**Nothing is appended twice, and nothing acknowledged is lost.** A request states how many tokens the SDK, or the caller
of an append, expects each cache to have, unless it only reads a cache that another client writes. A request that
appends or truncates also has an id. If the connection breaks, the transports send the request again. If the first
attempt had run, the second gets FAILED_PRECONDITION, since the length has changed, and the error says that the server
recognises the id. Then

- an append or a truncation has succeeded;
- an attention is requested again without keys and values: the result is the same, since positions count from the end;
- a layer is applied again, after the caches are truncated to where they were: only the layer can make its keys and
  values.

The last two cannot be done if another writer has appended meanwhile. The caller then gets the error that says
`appended`; or, if some of several caches have been truncated by then, the error of the one that could not be.

All other failures are for the caller to see. In particular, another length without that id proves nothing: it may be
due to another writer, or to an operation that was given up but ran all the same. The SDK takes over new lengths on
success only: if a caller repeats an operation that failed but did run, it is refused, and nothing is appended twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from attnserve._caching.groups import Words, at_once, cache_at, in_words_of_caller, portions
from attnserve._caching.state import CacheState, Handle, Handles
from attnserve._caching.turns import Turns
from attnserve._errors import FailedPreconditionError, InvalidRequestError, ProtocolError
from attnserve._requests import arguments, cache_requests
from attnserve._requests.apply import ApplyCall, ApplyOptions, encode_apply
from attnserve._requests.arguments import ArrayLike, ArrayOf, KindT
from attnserve._requests.attend import AttendCall, AttendOptions, encode_attend
from attnserve._requests.cache_requests import AppendLayout, CacheInfo, Truncation
from attnserve._requests.call import EncodedCall
from attnserve._requests.result import AttentionResult, LayerResult
from attnserve._rpc import Rpc
from attnserve.v1 import attention_pb2 as pb

T = TypeVar("T")

Request: TypeAlias = EncodedCall[Any] | Rpc[Any, Any]
"""What one step sends."""

Steps: TypeAlias = Generator[Request, Any, T]
"""Yields requests, is sent their results, and returns the result of the operation."""


class Plan(NamedTuple, Generic[T]):
    """An operation on caches."""

    steps: Steps[T]
    """What it does in its turn."""
    caches: Sequence[CacheState]
    """The caches, each once."""
    alone: bool
    """Whether it changes the caches or their known lengths, so that nothing else may use them meanwhile."""
    timeout: float | None
    """How long it may take, in seconds, including the wait for its turn; None for no limit."""

    @property
    def home(self) -> str | None:
        """The address of the server that holds all its caches."""
        return self.caches[0].home


def append(
    cache: CacheState,
    key: ArrayLike,
    value: ArrayLike,
    layer: int,
    layout: AppendLayout,
    expected_length: int | None,
    timeout: float | None,
) -> Plan[int]:
    """Appends to one layer, if that has the length that the caller expects, or that which is known in its turn. The
    result is the layer's length.
    """
    layer = _layer("layer", layer, (cache,))
    expected = None if expected_length is None else arguments.count("expected_length", expected_length, 0, 63)
    tokens, fields = cache_requests.appended(key, value, layout)

    def steps() -> Steps[int]:
        before = cache.tokens[layer] if expected is None else expected
        length = before + tokens
        cache.writes = True
        try:
            length = yield cache_requests.append(cache.info.name, layer, before, tokens, next(cache.ids), fields)
        except FailedPreconditionError as error:
            if not error.appended:
                raise
        cache.tokens[layer] = length
        return length

    return Plan(steps(), (cache,), True, timeout)


def truncate(cache: CacheState, length: int, timeout: float | None) -> Plan[None]:
    """Truncates all layers to a length."""
    length = arguments.count("length", length, 0, 63)
    return Plan(_truncating((cache,), (length,), lambda index, is_length: "length"), (cache,), True, timeout)


def truncate_all(turns: Turns, caches: Handles, lengths: int | Iterable[int], timeout: float | None) -> Plan[None]:
    """Truncates caches to lengths of their own, or to one for all."""
    states = at_once(_checked(turns, caches))
    if isinstance(lengths, Set | Mapping):
        raise InvalidRequestError(
            f"lengths: expected them in the order of the caches, found a {type(lengths).__name__}", field="lengths"
        )
    is_one = getattr(lengths, "ndim", None) == 0  # an array of one number has the method to iterate over it, too
    if isinstance(lengths, Iterable) and not is_one:
        each = [arguments.count(f"lengths[{index}]", length, 0, 63) for index, length in enumerate(lengths)]
        if len(each) != len(states):
            raise InvalidRequestError(
                f"lengths: expected {len(states)}, one for each cache, found {len(each)}", field="lengths"
            )
        return Plan(_truncating(states, each, cache_at), states, True, timeout)
    one = arguments.count("lengths", lengths, 0, 63)
    steps = _truncating(
        states, [one] * len(states), lambda index, is_length: "lengths" if is_length else cache_at(index, False)
    )
    return Plan(steps, states, True, timeout)


def _truncating(states: Sequence[CacheState], lengths: Sequence[int], words: Words) -> Steps[None]:
    _write(states)
    after = yield from _cut(states, lengths, [max(state.tokens) for state in states], words)
    for state, tokens in zip(states, after, strict=True):
        state.tokens[:] = tokens


def to_fork(turns: Turns, caches: Handles) -> Sequence[CacheState]:
    """The states of caches that are to be forked, each as often as it is given."""
    return at_once(_checked(turns, caches, repeated=True))


def fork(states: Sequence[CacheState], rpc: Rpc[Any, T], timeout: float | None) -> Plan[T]:
    """Makes other caches with the same content, by `rpc`, a request to fork them."""
    return Plan(_forking(rpc), list(dict.fromkeys(states)), False, timeout)


def _forking(rpc: Rpc[Any, T]) -> Steps[T]:
    try:
        return cast(T, (yield rpc))
    except InvalidRequestError as error:
        raise in_words_of_caller(error, cache_at) from None


def delete(caches: Sequence[CacheState], timeout: float | None) -> Plan[int]:
    """Deletes caches of one server, after all operations on them that were asked for before. The result is how many
    were there.
    """
    return Plan(_one(cache_requests.delete([cache.info.name for cache in caches])), caches, True, timeout)


def refresh(cache: CacheState, timeout: float | None) -> Plan[CacheInfo]:
    """Asks for the description of a cache, and takes over its lengths."""

    def steps() -> Steps[CacheInfo]:
        info: CacheInfo = yield cache_requests.get(cache.info)
        cache.tokens[:] = info.lengths
        return info

    return Plan(steps(), (cache,), True, timeout)


def attend(
    turns: Turns,
    caches: Handles,
    layer: int,
    query: ArrayOf[KindT],
    key: ArrayLike | None,
    value: ArrayLike | None,
    default_timeout: float | None,
    options: AttendOptions,
    layer_field: str = "cache_layer",
) -> Plan[AttentionResult[KindT]]:
    """Attends to caches, after appending keys and values to them, if any are given. `layer_field` is what its caller
    calls the layer.
    """
    states = _checked(turns, caches)
    layer = _layer(layer_field, layer, states)
    call = encode_attend(query, key, value, True, default_timeout=default_timeout, **options)
    without_keys = partial(encode_attend, query, None, None, True, **options)
    steps = _attending(states, layer, call, without_keys)
    return Plan(steps, states, key is not None, call.timeout)


def _attending(
    states: Sequence[CacheState], layer: int, call: AttendCall[T], without_keys: Callable[[], AttendCall[T]]
) -> Steps[AttentionResult[T]]:
    before = [state.tokens[layer] for state in states]
    if call.appends:
        _write(states)
    _refer(call, states, layer, before)
    try:
        result: AttentionResult[T] = yield call
    except FailedPreconditionError as error:
        if not error.appended:
            raise
        repeated = without_keys()
        repeated.started = call.started
        _refer(repeated, states, layer, _after(before, call.appends))
        try:
            result = yield repeated
        except FailedPreconditionError:
            raise error from None
    for state, length in zip(states, _lengths(result, states), strict=True):
        state.tokens[layer] = length
    return result


def apply(
    turns: Turns,
    caches: Handles,
    layer: str,
    input: ArrayOf[KindT],
    default_timeout: float | None,
    options: ApplyOptions,
) -> Plan[LayerResult[KindT]]:
    """Applies a layer whose blocks append their keys and values to the layers of the caches."""
    states = _checked(turns, caches)
    call = encode_apply(layer, input, True, default_timeout=default_timeout, **options)
    return Plan(_applying(states, call), states, True, call.timeout)


def _applying(states: Sequence[CacheState], call: ApplyCall[T]) -> Steps[LayerResult[T]]:
    before = [state.tokens[0] for state in states]
    _write(states)
    _refer(call, states, 0, before)
    while True:  # each time that it runs, its reply may be lost
        try:
            result: LayerResult[T] = yield call
            break
        except FailedPreconditionError as error:
            if not error.appended:
                raise
            appended: FailedPreconditionError | None = error
        longer = [each for each in zip(states, before, _after(before, call.appends), strict=True) if each[2] > each[1]]
        for portion in portions(longer, states[0].info.layers):
            some, lengths, found = zip(*portion, strict=True)
            try:
                yield from _cut(some, lengths, found, partial(_one_of, states, some))
            except FailedPreconditionError as even_longer:  # another writer has appended behind us
                raise appended or even_longer from None
            appended = None  # what was appended is no longer in all caches, so `error` is not true any more
    for state, length in zip(states, _lengths(result, states), strict=True):
        state.tokens[:] = [length] * len(state.tokens)
    return result


def _one_of(states: Sequence[CacheState], some: Sequence[CacheState], index: int, is_length: bool) -> str:
    """The words for some of the caller's caches, which the caller does not know to be truncated."""
    return cache_at(states.index(some[index]), False)


def _one(rpc: Rpc[Any, T]) -> Steps[T]:
    """The steps of an operation that is a single request."""
    return cast(T, (yield rpc))


def _cut(
    states: Sequence[CacheState], lengths: Sequence[int], expected: Sequence[int], words: Words
) -> Steps[Sequence[Sequence[int]]]:
    """Truncates caches to lengths of their own, all or none, and once. The result is the lengths of their layers after
    that. Errors are in these words.
    """
    truncations = [
        Truncation(state.info, length, before, next(state.ids))
        for state, length, before in zip(states, lengths, expected, strict=True)
    ]
    try:
        infos: Sequence[CacheInfo] = yield cache_requests.truncate(truncations)
    except InvalidRequestError as error:
        raise in_words_of_caller(error, words) from None
    except FailedPreconditionError as error:
        if not error.truncated:
            raise in_words_of_caller(error, words) from None
        return [[min(tokens, length) for tokens in state.tokens] for state, length in zip(states, lengths, strict=True)]
    return [info.lengths for info in infos]


def _after(before: Sequence[int], appends: Sequence[int]) -> list[int]:
    """The lengths after an append; `appends` has the number of tokens for each cache, or one number for all."""
    if len(appends) == 1:
        appends = list(appends) * len(before)
    if len(appends) != len(before):  # a server would have refused this
        return list(before)
    return [length + tokens for length, tokens in zip(before, appends, strict=True)]


def _write(states: Sequence[CacheState]) -> None:
    """Takes note that caches are about to be changed."""
    for state in states:
        state.writes = True


def _refer(call: EncodedCall[Any], states: Sequence[CacheState], layer: int, lengths: Sequence[int]) -> None:
    """Makes a call refer to caches, with their expected lengths. It appends to all or to none, so it has one id."""
    append_id = next(states[0].ids) if call.appends else 0
    references = [
        pb.CacheReference(
            name=state.info.name,
            layer=layer,
            expected_length=length if state.writes else None,
            append_id=append_id,
        )
        for state, length in zip(states, lengths, strict=True)
    ]
    after = _after(lengths, call.appends)
    call.cache_lengths = [length if state.writes else None for state, length in zip(states, after, strict=True)]
    call.prepend(call.operation.request_type(caches=references).SerializeToString())


def _lengths(result: AttentionResult[Any] | LayerResult[Any], states: Sequence[CacheState]) -> tuple[int, ...]:
    found = len(result.cache_lengths)
    if found != len(states):
        raise ProtocolError(f"the server was asked about {len(states)} caches and replied with {found} lengths")
    return result.cache_lengths


def one_or_many(cache: Handle | None, caches: Handles | None) -> Handles | None:
    """The caches named by the arguments `cache` and `caches`, of which only one may be given; None for none."""
    if cache is not None and caches is not None:
        raise InvalidRequestError("caches: expected cache or caches, found both", field="caches")
    return caches if cache is None else cache


def _checked(turns: Turns, caches: Handles, *, repeated: bool = False) -> Sequence[CacheState]:
    """The states of the caches, in the order of the sequences. InvalidRequestError if there are none, if they have no
    order, if one is there twice (unless they may be `repeated`), or if not all are of this client and on one server.
    """
    if isinstance(caches, Handle) and caches._state.turns is turns:
        return (caches._state,)
    if isinstance(caches, Set):
        raise InvalidRequestError("caches: expected them in an order, found a set, which has none", field="caches")
    handles = list(caches) if isinstance(caches, Iterable) and not isinstance(caches, str) else [caches]
    if not handles:
        raise InvalidRequestError("caches: expected one at least, found none", field="caches")
    states = [own(turns, handle) for handle in handles]
    if len(homes := dict.fromkeys(state.home or "the client's own address" for state in states)) > 1:
        found = " and ".join(homes)
        helps = "a fork is where its cache is, and a client of one address makes all caches there"
        raise InvalidRequestError(
            f"caches: expected caches of one server, found some at {found}; {helps}", field="caches"
        )
    if not repeated and len({state.info.name for state in states}) < len(states):
        raise InvalidRequestError("caches: expected each cache once, found one twice", field="caches")
    return states


def own(turns: Turns, handle: Any) -> CacheState:
    """The state of a cache. InvalidRequestError if it is not of this client."""
    if isinstance(handle, Handle) and handle._state.turns is turns:
        return handle._state
    found = repr(handle)
    if isinstance(handle, str):  # a cache's name is for whoever may use it, and is not shown
        found = "a string; open_cache makes a cache of its name"
    elif isinstance(handle, Handle):
        found = f"one of another client, {found}; open_cache opens it here, by its name"
    raise InvalidRequestError(f"caches: expected caches of this client, found {found}", field="caches")


def _layer(field: str, layer: int, states: Sequence[CacheState]) -> int:
    """The layer, if all caches have it; else InvalidRequestError, with the argument's name as its `field`."""
    index = arguments.count(field, layer, 0, 32)
    layers = min([state.info.layers for state in states])
    if index >= layers:
        raise InvalidRequestError(f"{field}: expected 0 to {layers - 1}, found {index}", field=field)
    return index
