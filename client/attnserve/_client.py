"""The client for threads.

In: the arguments of an operation. Out: its result, or a future of it. The parts: `_requests` encodes and decodes,
`_transports.threads` carries.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from attnserve._caching import plans
from attnserve._caching.caches import Cache, Caches
from attnserve._caching.finding import find
from attnserve._errors import ClientClosedError, DeadlineExceededError, UnavailableError
from attnserve._health import LIVENESS, READINESS, Patience
from attnserve._info import SERVER_INFO, ServerInfo
from attnserve._layers import Layers
from attnserve._requests import arguments, cache_requests
from attnserve._requests.apply import ApplyOptions, encode_apply
from attnserve._requests.arguments import ArrayLike, ArrayOf, KindT
from attnserve._requests.attend import AttendOptions, encode_attend
from attnserve._requests.result import AttentionResult, LayerResult
from attnserve._settings.config import DEFAULT_ADDRESS, Settings, Timeout, Transport
from attnserve._settings.credentials import TLS, Token, as_token
from attnserve._settings.targets import Address
from attnserve._thread_calls import Calls, wait
from attnserve._tracing import tracing_of

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
else:
    TracerProvider = Any  # for whoever reads annotations where there is no OpenTelemetry


class Client:
    """A connection to an attention service.

        with Client("127.0.0.1:8001") as client:
            result = client.attend(query, key, value, causal=True)

    It connects when it is first used, reconnects by itself, and may be shared by any number of threads, but not by
    processes: after a fork, a client that was used before raises `ClientClosedError` in the child, and calls that were
    in flight never complete there. Spawn processes instead, or make a client in each; gRPC itself may end the child of
    a process that is forked with calls in flight, or after an `AsyncClient` was used in it, however idle that is.

    When a server goes away, the calls in flight are sent again, which is safe because attention is pure: up to
    `retries` times each, after 0.05 to 0.1 seconds (at once if another server should answer), then twice that and so on
    up to 5, never beyond the call's timeout. Calls for which a server has no room wait for some, in the order of their
    priorities and ages, and no more are sent to it than it has had room for. OverloadedError tells those at once that
    would then not be answered within their timeout, and all of them if the server, asked again while it has no other
    call, refuses that `retries` times in a row. Without retries, and with ``transport="unary"``, nothing waits so: a
    refused call is sent again as often as others, no sooner than the server says. Other errors are not retried.
    """

    def __init__(
        self,
        address: Address = DEFAULT_ADDRESS,
        *,
        transport: Transport = "stream",
        timeout: float | None = 60.0,
        retries: int = 3,
        streams: int = 1,
        options: Sequence[tuple[str, Any]] = (),
        tls: TLS | None = None,
        token: str | Token | None = None,
        refresh: float = 10.0,
        tracing: bool | TracerProvider = False,
    ) -> None:
        """Sets up a client; nothing is sent yet. Raises ValueError, which names the wrong argument.

        - `address`: ``host:port`` or ``unix:/path``. For several equivalent servers: ``dns:///name:port``, which stands
          for all of them, a sequence of addresses, or a function that returns the current ones, called in any thread.
          Each then has streams of its own, and a call goes to the one with the fewest in flight.
        - `transport`: ``stream`` carries many calls in one message and is the fast way; ``unary`` sends each by itself.
        - `timeout`: how many seconds each call waits for its answer, unless it is given a timeout of its own; None for
          no limit. Only `layers.load` has another default, 600 s.
        - `retries`: how often a call is sent again when the server goes away. With 0 none waits for room either.
        - `streams`: over how many streams the calls to a server are spread. One is enough, unless small calls wait
          behind calls of tens of megabytes: then 2 to 4.
        - `options`: gRPC channel options, which override the SDK's own. ``("grpc.enable_http_proxy", 1)`` is for the
          proxy that ``http_proxy`` names; otherwise, none is used.
        - `tls`: a `TLS`, for a server that uses it. Default: plaintext.
        - `token`: the bearer token that identifies the caller, or a `Token` that names its file. Default: none.
        - `refresh`: how often the servers' addresses are looked up, in seconds; also done when a server goes away.
        - `tracing`: whether each call is an OpenTelemetry span, the parent of the server's spans: True for the global
          tracer provider, or a provider. Needs ``attnserve[tracing]``.
        """
        self._settings = Settings(address, transport, timeout, retries, streams, options, tls, as_token(token), refresh)
        self._calls = Calls(self._settings, tracing_of(tracing, self._settings.target.name))

    @arguments.takes_options(AttendOptions, encode_attend)
    def attend(
        self,
        query: ArrayOf[KindT],
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        caches: Cache | Iterable[Cache] | None = None,
        cache_layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[KindT]:
        """Computes one attention and waits for it.

        B is the batch, Hq and Hk the query and key/value heads, Lq and S the query and key length, D the head dimension
        of queries and keys, Dv that of values. Arrays are NumPy arrays or torch tensors on any device; the result is of
        the query's kind, on its device. Do not change them while the call is in flight. The service computes no
        gradients: tensors that require them are refused, unless torch records none (``torch.no_grad``). Lists, and
        arrays that other libraries show by DLPack, are taken for NumPy arrays, Python's own numbers in lists for
        float32 where floating ones are expected.

        - `query`: ``[B, Hq, Lq, D]``, or ``[Hq, Lq, D]``, or ``[Lq, D]``; float32, float16, bfloat16 or float64.
        - `key`, `value`: ``[B, Hk, S, D]`` and ``[B, Hk, S, Dv]``, of the query's rank and dtype. Hq must be a multiple
          of Hk: query head h reads key head ``h // (Hq // Hk)``.
        - `causal`: query i attends key j only if ``j <= offset + i``. True or ``"top_left"``: the offset is 0.
          ``"bottom_right"``: it is ``kv_length - Lq`` with each sequence's own lengths, so that its last query is
          aligned with the last of its keys that count. Default: False, which None means, too.
        - `query_offset`: the offset, an integer or ``[B]``, from -2**40 to 2**40: query i is at position ``offset + i``
          for `causal`, `window` and `alibi_slopes`. Default: as `causal` says; without it 0, or with `caches` as for
          ``"bottom_right"``.
        - `window`: ``(left, right)``: the query at position p attends ``p - left <= j <= p + right``; -1 is no bound.
        - `mask`: bool, or integers 0 and 1, true where a query attends a key, broadcast to ``[B, Hq, Lq, S]`` from the
          right, as in NumPy: a padding mask, ``[B, S]``, is passed as ``mask[:, None, None]``. If packed, Lq and S are
          those of the longest sequences.
        - `bias`: floating, added to the scores, broadcast like `mask`. -inf gives a key the weight 0, but does not
          exclude it: a NaN in its value still reaches the output.
        - `alibi_slopes`: ``[Hq]``: ``-slope * |offset + i - j|`` is added to the scores.
        - `sinks`: ``[Hq]``: ``exp(sink)`` is added to the denominator of the softmax.
        - `kv_lengths`: ``[B]``: keys from that length on are excluded. If packed: the number of keys of each sequence.
        - `query_lengths`: ``[B]``, only if packed: the number of queries of each sequence.
        - `scale`: the factor on the scores. Default ``1 / sqrt(D)`` for the dot product and 1 for other scores.
        - `softcap`: c in ``c * tanh(score / c)``, applied before bias and masks. Default none.
        - `score`: ``"dot"``, a `GeneralScore` or an `AdditiveScore`, learned ones: ``help(attnserve.AdditiveScore)``
          has the formula and the shapes of its parameters.
        - `layout`: ``"heads_first"`` as above; ``"length_first"``: ``[B, L, H, D]``; ``"packed"``: ``[total, H, D]``,
          with the sequences end to end.
        - `return_lse`: whether to return the log-sum-exp of each row. Default False.
        - `return_scores`: ``"raw"``, ``"capped"``, ``"masked"`` (after bias and masks) or ``"weights"``. Default none.
        - `timeout`: seconds to wait for the reply; None for no limit. Default: the client's.
        - `priority`: from -8 to 8, higher runs first. Default 0.
        - `caches`: resident caches of this client, one for each of the B sequences; a single one need not be in a list.
          `key` and `value`, if given, are first appended to all of them or to none; then their keys and values are
          attended to. S is the length of the longest, and `kv_lengths` default to the length of each. Offsets default
          to those of ``"bottom_right"``, for ``causal=True`` and also for `window` and `alibi_slopes` without it, which
          so count from the end of each cache. Not for the packed layout.
        - `cache_layer`: the layer of the caches. Default 0.

        A row with all keys excluded, or with a bias of -inf for all others, gives output 0, weights 0, and an lse of
        -inf, or of its sink alone.

        Raises an `AttnServeError`: `InvalidRequestError` (with its field), `OverloadedError` (with its delay),
        `DeadlineExceededError`, `UnavailableError` and the rest of the tree.
        """
        arguments.check_options("attend", options, AttendOptions, "key", "value", "caches", "cache_layer")
        if caches is None:
            return wait(self.submit(query, key, value, cache_layer=cache_layer, **options))
        timeout = self._settings.timeout
        return self._calls.perform(
            plans.attend(self._calls.turns, caches, cache_layer, query, key, value, timeout, options)
        )

    @arguments.takes_options(AttendOptions, encode_attend)
    def submit(
        self,
        query: ArrayOf[KindT],
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        caches: Cache | Iterable[Cache] | None = None,
        cache_layer: int = 0,
        **options: Unpack[AttendOptions],
    ) -> Future[AttentionResult[KindT]]:
        """Asks for one attention and returns a future of its result, so that one thread can keep many in flight.

        Arguments are those of `attend`. Cancelling the future also tells the server; finalizers (``__del__``) and
        signal handlers may do that, but nothing else with a client. Errors that take no server to find, in the
        arguments or because the client is closed, are raised here, all others by the future. The first call waits here
        until a name of servers is looked up. Callbacks of the future run in a thread of the client, one after the
        other: they must be quick, and must not wait for another call of this client, but may close it.
        """
        arguments.check_options("submit", options, AttendOptions, "key", "value", "caches", "cache_layer")
        timeout = self._settings.timeout
        if caches is None:
            arguments.check_no_layer(cache_layer)
            return self._calls.send(encode_attend(query, key, value, default_timeout=timeout, **options))
        return self._calls.carry_out(
            plans.attend(self._calls.turns, caches, cache_layer, query, key, value, timeout, options)
        )

    @arguments.takes_options(ApplyOptions, encode_apply)
    def apply(
        self,
        layer: str,
        input: ArrayOf[KindT],
        *,
        caches: Cache | Iterable[Cache] | None = None,
        cache: Cache | None = None,
        **options: Unpack[ApplyOptions],
    ) -> LayerResult[KindT]:
        """Applies a layer whose weights the server holds, and waits for it.

        B is the number of sequences, L and S the input and context length, d_in, d_context and d_out the layer's
        widths, Hq its query heads. Arrays are NumPy arrays or torch tensors on any device; the result is of the input's
        kind, on its device. Do not change them while the call is in flight. Lists are taken for NumPy arrays, Python's
        own numbers in them for float32, or for token ids if all are integers.

        - `layer`: the layer's name; `layers` lists them.
        - `input`: activations, ``[B, L, d_in]``, or ``[L, d_in]`` for one sequence; float32, float16, bfloat16 or
          float64, which is the dtype of the output. For a layer that begins with an embedding, token ids instead:
          integers, ``[B, L]`` or ``[L]``; the output then has the layer's dtype.
        - `lengths`: ``[B]``, for sequences of different lengths. Either they are padded to L (anything beyond a length
          is ignored, and 0 in the output), or packed, end to end: the input is then ``[total, d_in]`` or ``[total]``.
        - `context`: what the input attends to, for cross-attention: ``[B, S, d_context]``, ``[S, d_context]`` or packed
          ``[total, d_context]``, padded or packed as the input is, of its dtype. Default: the input itself.
        - `context_lengths`: ``[B]``, like `lengths`, for the context.
        - `mask`: bool, or integers 0 and 1, true where a position attends another, broadcast to ``[B, Hq, L, S]``.
        - `bias`: floating, added to the scores, broadcast like `mask`.
        - `causal`: input i attends position j only if ``j <= offset + i``. True or ``"top_left"``: the offset is 0.
          ``"bottom_right"``: it is the length of each sequence's context minus its own. Default None: as the layer is
          defined.
        - `query_offset`: the offset, an integer or ``[B]``; rotary and learned positions also start from it. Not with
          `caches`.
        - `window`: ``(left, right)``: position p attends ``p - left <= j <= p + right``; -1 is no bound. Default: as
          the layer is defined.
        - `segments`: the segment (token type) of each token id, in the input's shape. Default 0.
        - `return_lse`: whether to return the log-sum-exp of each row and head. Default False.
        - `return_scores`: ``"raw"``, ``"capped"``, ``"masked"`` (after bias and masks) or ``"weights"``. Default none.
        - `average_scores`: whether to average the scores over the heads. Default False.
        - `timeout`: seconds to wait for the reply; None for no limit. Default: the client's.
        - `priority`: from -8 to 8, higher runs first. Default 0.
        - `caches`: resident caches of this client, one for each of the B sequences, each with as many layers as the
          decoder has blocks, these all of one length (else `FailedPreconditionError`); the blocks append their keys and
          values to them. Inputs attend to everything in the caches, and their positions continue from the caches'
          lengths.
        - `cache`: a single cache, instead of `caches`.

        To transformers, which define their blocks themselves, `causal`, `window`, `bias`, `return_lse` and
        `return_scores` are an error.

        Raises an `AttnServeError` as `attend` does, and `NotFoundError` if no layer has that name.
        """
        arguments.check_options("apply", options, ApplyOptions, "caches", "cache", hints=arguments.OF_A_LAYER)
        chosen = plans.one_or_many(cache, caches)
        if chosen is None:
            return wait(self.submit_apply(layer, input, **options))
        timeout = self._settings.timeout
        return self._calls.perform(plans.apply(self._calls.turns, chosen, layer, input, timeout, options))

    @arguments.takes_options(ApplyOptions, encode_apply)
    def submit_apply(
        self,
        layer: str,
        input: ArrayOf[KindT],
        *,
        caches: Cache | Iterable[Cache] | None = None,
        cache: Cache | None = None,
        **options: Unpack[ApplyOptions],
    ) -> Future[LayerResult[KindT]]:
        """Asks for a layer to be applied and returns a future of the result.

        Arguments are those of `apply`; the future is like that of `submit`.
        """
        arguments.check_options("submit_apply", options, ApplyOptions, "caches", "cache", hints=arguments.OF_A_LAYER)
        timeout = self._settings.timeout
        chosen = plans.one_or_many(cache, caches)
        if chosen is None:
            return self._calls.send(encode_apply(layer, input, default_timeout=timeout, **options))
        return self._calls.carry_out(plans.apply(self._calls.turns, chosen, layer, input, timeout, options))

    @property
    def layers(self) -> Layers:
        """The layers on the servers: ``list``, ``get``, ``load`` and ``unload``."""
        return Layers(self._calls)

    def create_cache(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layers: int = 1,
        dtype: Any = "float32",
        ttl: float | None = None,
        alias: str | None = None,
        timeout: Timeout = ...,
    ) -> Cache:
        """Creates an empty cache on the server. As a context manager, the cache is deleted when the body ends.

        - `num_kv_heads`, `head_dim`: the heads of keys and values, and the width of each key head.
        - `value_dim`: the width of each value head. Default: `head_dim`.
        - `layers`: how many layers it has, each with a length of its own.
        - `dtype`: ``"float32"``, ``"float16"`` or ``"bfloat16"``, or NumPy's or torch's of these: the dtype stored,
          whatever is appended.
        - `ttl`: how long it lives after its last use, in seconds; then it is not found any more, and evicted when room
          is needed. Default: as the server is configured, or else until it is deleted.
        - `alias`: a name of your own for it, such as ``"user:42"``, of at most 256 bytes. If you have a cache of this
          alias already, perhaps made by another process, this finds it: with the tokens and the ttl that it has, and as
          if by `open_cache`; do not enter what others still use. Of several servers, the alias and their addresses, as
          they are written, decide which one has it: only that is asked, and what it makes stays, even if this call is
          given up.
        - `timeout`: in seconds for each server that is asked; None for no limit. Default: the client's.

        Retries never make a second cache. Without an alias: if a server is full or unavailable, another is asked at
        once. If all are, one that is unavailable is asked again as for any call, and of the full ones, up to `retries`
        times, the one that says that it has room soonest. If the call is given up, or fails without an answer, a cache
        that it made is deleted as soon as its server hears of that; if it never does, the cache stays until its `ttl`
        ends, and `caches` lists it.
        """
        rpc = cache_requests.create(num_kv_heads, head_dim, value_dim, layers, dtype, ttl, alias)
        timeout = self._calls.seconds(timeout)
        if alias is not None:
            home = self._calls.servers.home_for(alias, timeout)
            info = self._calls.ask(rpc, timeout, home)
            return Cache(self, info, home or info.address, opened=True)
        return self._calls.make(rpc, timeout, partial(Cache, self))

    def open_cache(self, name: str, *, address: str | None = None, timeout: Timeout = ...) -> Cache:
        """A cache that was created elsewhere, by its name. `NotFoundError` if the caller has no cache of that name.
        Leaving a `with` deletes it, as with `create_cache`: do not enter what others still use.

        As long as this `Cache` is only read, it is attended to at whatever length it has by then, so that one process
        can append to it and others read it. Once it appends or truncates, it expects the length that it knows.

        `address`: that of its server, from `Cache.address`; by default, all servers that the client knows are asked.
        """
        if address is not None:
            address = arguments.address("address", address)
            return Cache(self, self._calls.ask(cache_requests.get(name), timeout, address), address, opened=True)
        info, home = find(self._calls, name, timeout)
        return Cache(self, info, home or info.address, opened=True)

    @property
    def caches(self) -> Caches:
        """The caller's caches on the server: ``list``, ``pool``, ``get``, ``fork``, ``truncate`` and ``delete``."""
        return Caches(self)

    def server_info(self, *, timeout: Timeout = ...) -> ServerInfo:
        """Describes the server, also while it starts or drains. `timeout` in seconds; None for no limit; by
        default the client's. Raises an `AttnServeError`.
        """
        return self._calls.ask(SERVER_INFO, timeout)

    def is_ready(self, *, timeout: Timeout = ...) -> bool:
        """Whether to send requests to the server: False while it starts or drains. `timeout` in seconds; None for no
        limit; by default the client's. Raises an `AttnServeError`, `UnavailableError` if it cannot be reached.
        """
        return self._calls.ask(READINESS, timeout)

    def is_alive(self, *, timeout: Timeout = ...) -> bool:
        """Whether the server works, even if it is not ready. Arguments and errors as for `is_ready`."""
        return self._calls.ask(LIVENESS, timeout)

    def wait_until_ready(self, *, timeout: Timeout = ...) -> None:
        """Waits for a server that may not have started yet, or drains: until it takes requests. `timeout` in seconds;
        None for no limit; by default the client's. Raises DeadlineExceededError if it is not ready by then, and
        whatever else `is_ready` does but for UnavailableError.
        """
        patience = Patience(self._calls.seconds(timeout))
        while True:
            failure = None
            try:
                if self.is_ready(timeout=patience.left):
                    return
            except (UnavailableError, DeadlineExceededError) as error:
                failure = error
            time.sleep(patience.pause(failure))

    def close(self) -> None:
        """Ends the connection. Calls in flight fail with `ClientClosedError`. Do not call it in a signal handler, which
        may run in the middle of a call: have that set a flag, or raise an exception. That of a handler of SIGINT,
        SIGTERM, SIGALRM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGABRT, SIGVTALRM or SIGPROF ends the call that the main
        thread is in, whose effect is then unknown, and the client works on; no other handler may raise one. If the
        main thread is in `concurrent.futures.wait` or `as_completed`, which lock futures in Python code of their own,
        an exception may leave one locked, and the client without replies: wait for each future by its `result` instead.
        """
        self._calls.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._calls.servers.is_closed else ""
        return f"Client({self._settings.target.name!r}{closed})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled: make one in each process")

    def __enter__(self) -> Self:
        if self._calls.servers.is_closed:
            raise ClientClosedError
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
