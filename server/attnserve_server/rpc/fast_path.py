"""The fast path: answers a message as soon as it is read, all its requests as one batch.

In: messages of callers. Out: for each, the message with the replies, or that it has to go the ordinary way. It is
answered here only if nothing waits or runs before it, and if it asks for little, in layouts that are known
(`native/layouts.py`). The ordinary way gives the same answers, or says what is wrong with the message.

The fast path never yields to the event loop. So no caller can leave meanwhile, and nothing has to be kept of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

from attnserve_server.caches.request import CachedRequest
from attnserve_server.native.layouts import layout_of
from attnserve_server.native.library import NAME
from attnserve_server.requests.request import Request
from attnserve_server.scheduling.watchdog import SLOWEST_FLOPS

if TYPE_CHECKING:
    from attnserve_server.access.callers import Caller
    from attnserve_server.caches.fast_path import CacheFastPath
    from attnserve_server.native.messages import Asked, Messages
    from attnserve_server.observability.metrics import Metrics
    from attnserve_server.requests.work import Work
    from attnserve_server.scheduling.engine import Engine

LARGEST_MESSAGE: Final = 4 << 20
"""Bytes: larger messages are not looked at, since most ask for too much."""

MOST_CANDIDATES: Final = 1024
"""How many keys of requests whose layout is unknown are remembered."""


@dataclass(slots=True)
class Answered:
    """The answer to a message, and what admission counts for the requests in it until it has been sent."""

    message: bytes
    caller: Hashable
    requests: int
    size: int
    query_tokens: int
    flops: int
    device_seconds: float


class Declined(NamedTuple):
    """A message that is to go the ordinary way. Nothing has happened yet."""

    learns: bool
    """Whether that is because a layout is unknown. Its requests may then teach it: see `FastPath.learn_from`."""


_ORDINARY: Final = Declined(learns=False)
_UNKNOWN_LAYOUT: Final = Declined(learns=True)


class FastPath:
    """The fast path to an engine's device."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        messages: Messages,
        max_requests: int,
        max_reply_bytes: int,
        caches: CacheFastPath,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._messages = messages
        self._max_requests = max_requests
        self._max_reply_bytes = max_reply_bytes
        self._caches = caches
        self._max_cost = engine.worker.inline_flops
        self._least_timeout = self._max_cost / SLOWEST_FLOPS
        """In seconds. What has a shorter timeout goes the ordinary way, which finds out whether it is enough."""
        self._candidates: dict[Hashable, bool] = {}
        """Keys of requests whose layout is unknown, in the order in which they came last. Each has whether its layout
        may be learnt when it comes again: False once the library has turned out not to suit it.
        """

    def answer_message(
        self, caller: Caller, message: bytes, arrival: float, in_flight: Collection[int]
    ) -> Answered | Declined:
        """The answer to a message on a stream. `in_flight` are the ids of the stream's calls that are in flight."""
        if len(message) > LARGEST_MESSAGE or not self._engine.is_free:
            return _ORDINARY
        asked = self._messages.read_message(message, self._max_requests)
        if (asked.requests > 1 or in_flight) and not _are_new(self._messages.ids(asked), in_flight):
            return _ORDINARY
        return self._answer(caller, asked, message, arrival)

    def answer_request(
        self, caller: Caller, message: bytes, arrival: float, timeout: float | None
    ) -> Answered | Declined:
        """The answer to the message of a unary call, whose caller waits for `timeout` seconds."""
        if len(message) > LARGEST_MESSAGE or not self._engine.is_free:
            return _ORDINARY
        if timeout is not None and timeout < self._least_timeout:
            return _ORDINARY
        return self._answer(caller, self._messages.read_request(message), message, arrival)

    def _answer(self, caller: Caller, asked: Asked, message: bytes, arrival: float) -> Answered | Declined:
        """The answer to the message that the library has read last; `asked` is what it has found there. If the message
        is declined, nothing has changed.
        """
        engine, messages, requests = self._engine, self._messages, asked.requests
        if requests < 0:
            return _UNKNOWN_LAYOUT
        size = max(asked.request_bytes + asked.result_bytes, 2 * asked.result_bytes)  # as `Entry.count`
        if (
            not requests
            or asked.cost > self._max_cost
            or asked.timeout < self._least_timeout * 1e9
            or asked.result_bytes > self._max_reply_bytes
            or not engine.has_room_for(caller.share, size, requests)
        ):
            return _ORDINARY
        begin = staged = perf_counter()
        calls, effort, flops, turn = requests, asked.effort, asked.flops, None  # a kernel call each; see below
        if asked.cached:
            turn = self._caches.begin(caller.name, asked, message, self._max_cost)
            if turn is None:
                return _ORDINARY
            calls += sum(len(request.uses) - 1 for request in turn.requests)  # one for each cache
            effort, flops, staged = turn.effort, turn.flops, perf_counter()
        waited_ns, staging = int((begin - arrival) * 1e9), staged - begin
        decode_ns = waited_ns // requests
        queue_ns = waited_ns - decode_ns  # while other requests of the message were decoded
        answer = None
        try:
            compute_ns = messages.compute(effort, decode_ns, queue_ns, int(staging * 1e9))
            answer = messages.write()
        except (MemoryError, ArithmeticError):  # the ordinary way knows what to do about NaN and infinities
            return _ORDINARY
        finally:
            if turn is not None:
                turn.end(failed=answer is None)
        size = min(size, 2 * len(answer))  # as `Engine.answered` leaves of any entry
        seconds = compute_ns * 1e-9
        engine.computed_inline(caller.share, size, requests, seconds)
        encode = (perf_counter() - staged - seconds) / requests
        self._metrics.batch(requests, flops, asked.tokens, 0.0, {NAME: calls})
        self._metrics.phases((decode_ns * 1e-9, queue_ns * 1e-9, staging, seconds, encode), requests)
        return Answered(answer, caller.share, requests, size, asked.tokens, flops, seconds)

    def learn_from(self, request: Work, message: bytes, begin: int) -> None:
        """Takes note of a request that went the ordinary way; `begin` is where it begins in the message. When one like
        it comes again, the layout of such requests is learnt.
        """
        if not isinstance(request, Request | CachedRequest):
            return
        key = self._key_of(request)
        if self._messages.knows(key):
            return
        comes_again = key in self._candidates
        may_suit = self._candidates.pop(key, True)
        if comes_again and may_suit:
            if self._learn(key, request, message, begin):
                return
            may_suit = False
        if len(self._candidates) >= MOST_CANDIDATES:
            del self._candidates[next(iter(self._candidates))]
        self._candidates[key] = may_suit

    def _key_of(self, request: Request | CachedRequest) -> Hashable:
        """What requests of the same layout have in common."""
        return request.problem if isinstance(request, Request) else self._caches.key_of(request)

    def _learn(self, key: Hashable, request: Request | CachedRequest, message: bytes, begin: int) -> bool:
        """Learns the layout of requests like this one, if they suit the native library; returns whether they do."""
        if request.extent.cost > self._max_cost or request.payloads.buffer is not message:
            return False
        layout = layout_of(request) if isinstance(request, Request) else self._caches.layout_of(request)
        return layout is not None and self._messages.learn(key, layout, request.payloads, begin, request.received_bytes)


def _are_new(ids: list[int], in_flight: Collection[int]) -> bool:
    """Whether all ids differ, and none is in flight."""
    return len(set(ids)) == len(ids) and not any(each in in_flight for each in ids)
