"""The client for threads.

In: the arguments of an operation. Out: its result, or a future of it. The parts: `_attend` and `_apply` encode,
`_threads` carries, `_reply` decodes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar, Unpack

import grpc

from attnserve._apply import ApplyOptions, encode_apply
from attnserve._arguments import ArrayLike, ArrayT
from attnserve._attend import AttendOptions, encode_attend
from attnserve._call import EncodedCall
from attnserve._config import DEFAULT_ADDRESS, Settings, Transport, checked_timeout
from attnserve._info import SERVER_INFO, ServerInfo
from attnserve._layers import Layers
from attnserve._reply import decode_response
from attnserve._result import AttentionResult, LayerResult
from attnserve._retry import RetryPolicy
from attnserve._rpc import Rpc
from attnserve._threads import CallFuture, StreamTransport, UnaryTransport

T = TypeVar("T")


class Client:
    """A connection to an attention service.

        with Client("127.0.0.1:8001") as client:
            result = client.attend(query, key, value, causal=True)

    It connects when it is first used, connects again by itself, and may be shared by any number of threads. After a
    fork it must not be used in the child if it was used in the parent; start processes by spawning.

    When a server goes away, the calls in flight are sent again, which is safe because attention is pure: up to
    `retries` times each, after 0.05 to 0.1 seconds, then twice that and so on, and never beyond the call's timeout.
    Other errors are not retried.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        transport: Transport = "stream",
        timeout: float | None = 60.0,
        retries: int = 3,
        streams: int = 1,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Sets up a client; nothing is sent yet. ValueError names an argument that is wrong.

        - `address`: ``host:port``, ``unix:/path``, or ``dns:///name:port`` to spread streams over all that it names.
        - `transport`: ``stream`` carries many calls in one message and is the fast way; ``unary`` sends each by itself.
        - `timeout`: seconds that a call waits for its reply unless it says otherwise; None for no limit.
        - `retries`: how often a call is sent again when the server goes away.
        - `streams`: how many streams the calls are spread over. One is enough for one server.
        - `options`: gRPC channel options, which win over the SDK's own.
        """
        self._settings = Settings(address, transport, timeout, retries, streams, tuple(options))
        channel = grpc.insecure_channel(address, options=self._settings.channel_options)
        policy = RetryPolicy(retries)
        self._unary = UnaryTransport(channel, policy)
        self._streams = [StreamTransport(channel, policy) for _ in range(streams)] if transport == "stream" else []
        transports: list[UnaryTransport | StreamTransport] = [self._unary, *self._streams]
        self._parts = (transports, channel)
        # A client that is forgotten rather than closed. The collector may notice it in any thread, one of the
        # transports' own with its lock held too, so that closing must not happen right there.
        self._forgotten = weakref.finalize(self, _close_elsewhere, *self._parts)
        self._forgotten.atexit = False

    def attend(
        self, query: ArrayT, key: ArrayLike, value: ArrayLike, **options: Unpack[AttendOptions]
    ) -> AttentionResult[ArrayT]:
        """Computes one attention and waits for it.

        B is the batch, Hq and Hk the query and key/value heads, Lq and S the query and key length, D the head dimension
        of queries and keys, Dv that of values. Arrays are NumPy arrays or torch tensors of any device; the result is
        of the query's kind, on its device. They must not change while the call is in flight.

        - `query`: ``[B, Hq, Lq, D]``, or ``[Hq, Lq, D]``, or ``[Lq, D]``; float32, float16, bfloat16 or float64.
        - `key`, `value`: ``[B, Hk, S, D]`` and ``[B, Hk, S, Dv]``, of the query's rank and dtype. Hq must be a multiple
          of Hk: query head h reads key head ``h // (Hq // Hk)``.
        - `causal`: query i attends key j only if ``j <= offset + i``. True or ``"top_left"``: the offset is 0.
          ``"bottom_right"``: it is ``S - Lq``, the last query standing at the last key. Default False.
        - `query_offset`: the offset, an integer or ``[B]``; may be negative. Wins over what `causal` says of it.
        - `window`: ``(left, right)``: the query at position p attends ``p - left <= j <= p + right``; -1 is no bound.
        - `mask`: bool or 0 and 1, true where a query attends a key, broadcast to ``[B, Hq, Lq, S]``.
        - `bias`: floating, added to the scores, broadcast like `mask`.
        - `alibi_slopes`: ``[Hq]``: ``-slope * |offset + i - j|`` is added to the scores.
        - `sinks`: ``[Hq]``: ``exp(sink)`` joins the denominator of the softmax.
        - `kv_lengths`: ``[B]``: keys from that length on are excluded. Where packed: the lengths of the sequences.
        - `query_lengths`: ``[B]``, where packed and only there.
        - `scale`: the factor on the scores. Default ``1 / sqrt(D)`` for the dot product and 1 for other scores.
        - `softcap`: c in ``c * tanh(score / c)``, applied before bias and masks. Default none.
        - `score`: ``"dot"``, a `GeneralScore` or an `AdditiveScore`.
        - `layout`: ``"heads_first"`` as above; ``"length_first"``: ``[B, L, H, D]``; ``"packed"``: ``[total, H, D]``,
          sequences end to end.
        - `return_lse`: whether to return the log-sum-exp of each row. Default False.
        - `return_scores`: ``"raw"``, ``"capped"``, ``"masked"`` (after bias and masks) or ``"weights"``. Default none.
        - `timeout`: seconds to wait for the reply; None for no limit. Default: the client's.
        - `priority`: from -8 to 8, higher runs first. Default 0.

        A row whose every key is excluded gives output 0, weights 0 and lse -inf.

        Raises an `AttnServeError`: `InvalidRequestError` (with its field), `OverloadedError` (with its delay),
        `DeadlineExceededError`, `UnavailableError` and the rest of the tree. ValueError for a timeout that is none.
        """
        return _wait(self.submit(query, key, value, **options))

    def submit(
        self, query: ArrayT, key: ArrayLike, value: ArrayLike, **options: Unpack[AttendOptions]
    ) -> Future[AttentionResult[ArrayT]]:
        """Asks for one attention and returns a future of its result, so that one thread can keep many in flight.

        Arguments are those of `attend`. Cancelling the future has the server told. What is wrong with the arguments
        themselves is raised here; everything else is raised by the future. Callbacks of the future run in the thread
        that reads replies: they must be quick, and must not wait for another call of this client.
        """
        return self._send(encode_attend(query, key, value, default_timeout=self._settings.timeout, **options))

    def apply(self, layer: str, input: ArrayT, **options: Unpack[ApplyOptions]) -> LayerResult[ArrayT]:
        """Applies a layer whose weights the server holds, and waits for it.

        B is the number of sequences, L and S the input and context length, d_in, d_context and d_out the layer's
        widths, Hq its query heads. Arrays are NumPy arrays or torch tensors of any device; the result is of the input's
        kind, on its device. They must not change while the call is in flight.

        - `layer`: the layer's name; `layers` lists them.
        - `input`: activations, ``[B, L, d_in]``, or ``[L, d_in]`` for one sequence; float32, float16, bfloat16 or
          float64, which is the dtype of the output. For a layer that begins with an embedding, token ids instead:
          integers, ``[B, L]`` or ``[L]``; the output then has the layer's dtype.
        - `lengths`: ``[B]``, for sequences of different lengths. Either they are padded to L (what lies beyond a length
          is not looked at, and 0 in the output), or packed, end to end: the input is then ``[total, d_in]`` or
          ``[total]``.
        - `context`: what the input attends to, for cross-attention: ``[B, S, d_context]``, ``[S, d_context]`` or packed
          ``[total, d_context]``, padded or packed as the input is, of its dtype. Default: the input itself.
        - `context_lengths`: ``[B]``, as `lengths`, of the context.
        - `mask`: bool or 0 and 1, true where a position attends another, broadcast to ``[B, Hq, L, S]``.
        - `bias`: floating, added to the scores, broadcast like `mask`.
        - `causal`: input i attends position j only if ``j <= offset + i``. True or ``"top_left"``: the offset is 0.
          ``"bottom_right"``: it is ``S - L``. Default None: as the layer is defined.
        - `query_offset`: the offset, an integer or ``[B]``, which rotary and learned positions count from too.
        - `window`: ``(left, right)``: position p attends ``p - left <= j <= p + right``; -1 is no bound. Default: as
          the layer is defined.
        - `segments`: the segment (token type) of each token id, of the input's shape. Default 0.
        - `return_lse`: whether to return the log-sum-exp of each row and head. Default False.
        - `return_scores`: ``"raw"``, ``"capped"``, ``"masked"`` (after bias and masks) or ``"weights"``. Default none.
        - `average_scores`: whether to average the scores over the heads. Default False.
        - `timeout`: seconds to wait for the reply; None for no limit. Default: the client's.
        - `priority`: from -8 to 8, higher runs first. Default 0.

        Transformers say `causal`, `window` and `bias` themselves, and give neither lse nor scores.

        Raises an `AttnServeError` as `attend` does, and `NotFoundError` if no layer has that name.
        """
        return _wait(self.submit_apply(layer, input, **options))

    def submit_apply(self, layer: str, input: ArrayT, **options: Unpack[ApplyOptions]) -> Future[LayerResult[ArrayT]]:
        """Asks for a layer to be applied and returns a future of the result.

        Arguments are those of `apply`; the future is as that of `submit`.
        """
        return self._send(encode_apply(layer, input, default_timeout=self._settings.timeout, **options))

    @property
    def layers(self) -> Layers:
        """The layers that the server holds: ``list``, ``get``, ``load`` and ``unload``."""
        return Layers(self._ask)

    def server_info(self, *, timeout: float | None = 60.0) -> ServerInfo:
        """What the server is. `timeout` in seconds; None for no limit. Raises an `AttnServeError`."""
        return self._ask(SERVER_INFO, timeout)

    def close(self) -> None:
        """Ends the connection. Calls in flight fail with `ClientClosedError`."""
        self._forgotten.detach()
        _close(*self._parts)

    def _send(self, call: EncodedCall[T]) -> Future[T]:
        future: CallFuture[Any, T]
        if self._streams:
            future = CallFuture(call.result)
            future.client = self  # before it is sent: the reply lets go of the client
            stream = self._streams[0] if len(self._streams) == 1 else min(self._streams, key=len)
            stream.submit(future, call)
        else:
            operation = call.operation
            future = CallFuture(lambda data: call.result(decode_response(operation, data)))
            future.client = self
            self._unary.submit(future, operation.path, call.pieces, call.timeout)
        return future

    def _ask(self, rpc: Rpc[Any, T], timeout: float | None, /) -> T:
        future = CallFuture(rpc.decode)
        message = rpc.request.SerializeToString()
        self._unary.submit(future, rpc.path, [message], checked_timeout(timeout), repeatable=rpc.repeatable)
        return _wait(future)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _wait(future: Future[T]) -> T:
    """The result of a future, which is given up if an interrupt ends the wait."""
    try:
        return future.result()
    except BaseException:
        future.cancel()  # nothing, unless it was an interrupt
        raise


def _close(transports: Sequence[UnaryTransport | StreamTransport], channel: grpc.Channel) -> None:
    for transport in transports:
        transport.close()
    channel.close()


def _close_elsewhere(transports: Sequence[UnaryTransport | StreamTransport], channel: grpc.Channel) -> None:
    threading.Thread(target=_close, args=(transports, channel), name="attnserve-close", daemon=True).start()
