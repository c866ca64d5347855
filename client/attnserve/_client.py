"""The client for threads.

In: the arguments of an attention. Out: its result, or a future of it. The parts: `_request` encodes, `_threads`
carries, `_result` decodes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, Unpack

import grpc

from attnserve._config import DEFAULT_ADDRESS, Settings, Transport, checked_timeout
from attnserve._info import ServerInfo, decode_info
from attnserve._request import ArrayLike, ArrayT, AttendOptions, encode_attend
from attnserve._result import AttentionResult, attention_result, decode_response
from attnserve._retry import RetryPolicy
from attnserve._threads import CallFuture, StreamTransport, UnaryTransport


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
        future = self.submit(query, key, value, **options)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # nothing, unless an interrupt ended the wait
            raise

    def submit(
        self, query: ArrayT, key: ArrayLike, value: ArrayLike, **options: Unpack[AttendOptions]
    ) -> Future[AttentionResult[ArrayT]]:
        """Asks for one attention and returns a future of its result, so that one thread can keep many in flight.

        Arguments are those of `attend`. Cancelling the future has the server told. What is wrong with the arguments
        themselves is raised here; everything else is raised by the future. Callbacks of the future run in the thread
        that reads replies: they must be quick, and must not wait for another call of this client.
        """
        call = encode_attend(query, key, value, default_timeout=self._settings.timeout, **options)
        future: CallFuture[Any, AttentionResult[ArrayT]]
        if self._streams:
            future = CallFuture(partial(attention_result, call))
            stream = self._streams[0] if len(self._streams) == 1 else min(self._streams, key=len)
            stream.submit(future, call.pieces, call.size, call.timeout)
        else:
            future = CallFuture(lambda data: attention_result(call, decode_response(data)))
            self._unary.submit(future, "Attend", call.pieces, call.timeout)
        future.client = self
        return future

    def server_info(self, *, timeout: float | None = 60.0) -> ServerInfo:
        """What the server is. `timeout` in seconds; None for no limit. Raises an `AttnServeError`."""
        future = CallFuture(decode_info)
        self._unary.submit(future, "ServerInfo", [], checked_timeout(timeout))
        return future.result()

    def close(self) -> None:
        """Ends the connection. Calls in flight fail with `ClientClosedError`."""
        self._forgotten.detach()
        _close(*self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(transports: Sequence[UnaryTransport | StreamTransport], channel: grpc.Channel) -> None:
    for transport in transports:
        transport.close()
    channel.close()


def _close_elsewhere(transports: Sequence[UnaryTransport | StreamTransport], channel: grpc.Channel) -> None:
    threading.Thread(target=_close, args=(transports, channel), name="attnserve-close", daemon=True).start()
