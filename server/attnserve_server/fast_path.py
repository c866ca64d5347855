"""The fast path: messages that are answered as soon as they are read, all requests of one as one batch.

In: messages of callers. Out: the message that answers one, where nothing waits or runs before it, and it asks for
little, of layouts that came before; or nothing: then it goes the way of all others, which ends in the same answers, or
in what is wrong with it. It takes no turn of the event loop: nobody can leave meanwhile, and nothing has to be kept of
a request.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest
from attnserve_server.native.library import NAME
from attnserve_server.pace import Amount, Part
from attnserve_server.request import MAX_KNOWN_HEADER, request_of
from attnserve_server.watchdog import SLOWEST_FLOPS

if TYPE_CHECKING:
    from attnserve_server.engine import Engine
    from attnserve_server.limits import RequestLimits
    from attnserve_server.metrics import Metrics
    from attnserve_server.native.messages import Asked, Messages

LARGEST_MESSAGE: Final = 4 << 20
"""Bytes: larger ones are not looked at, and ask for too much mostly."""

LEARNT_FROM: Final = 16
"""Of every so many messages the time is learnt: nothing waits for such, and to learn it takes half as long again."""

PATIENCE: Final = 16
"""After so many requests of a length without one like the one before, those of this length are left to others."""
MOST_LENGTHS: Final = 256
"""Of so many lengths it is remembered what came last."""


@dataclass(slots=True)
class Seen:
    """The last header of some length of request, and how many others came before it."""

    header: bytes
    others: int


@dataclass(slots=True)
class Answered:
    """The answer to a message, and what the requests in it hold of the server until it has left."""

    message: bytes
    caller: Hashable
    requests: int
    size: int
    query_tokens: int
    flops: int


class FastPath:
    """The fast path to an engine's device."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        messages: Messages,
        limits: RequestLimits,
        max_requests: int,
        max_reply_bytes: int,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._messages = messages
        self._limits = limits
        self._max_requests = max_requests
        self._max_reply_bytes = max_reply_bytes
        self._max_cost = engine.worker.inline_flops
        self._least_timeout = self._max_cost / SLOWEST_FLOPS
        """Whether less than this is time enough is known elsewhere."""
        self._answers = 0
        self._seen: dict[int, Seen] = {}

    def answer_message(
        self, caller: Hashable, message: bytes, arrival: float, in_flight: Collection[int]
    ) -> Answered | None:
        """The answer to a message on a stream of a caller (`Caller.share`), of whose calls those with these ids are in
        flight. None: it is to go the way of others, and nothing has happened yet.
        """
        if len(message) > LARGEST_MESSAGE or not self._engine.is_free:
            return None
        asked = self._messages.read_message(message, self._max_requests)
        if (asked.requests > 1 or in_flight) and not _are_new(self._messages.ids(asked), in_flight):
            return None
        return self._answer(caller, message, asked, arrival)

    def answer_request(
        self, caller: Hashable, message: bytes, arrival: float, timeout: float | None
    ) -> Answered | None:
        """The same for a unary call, whose caller waits for so long."""
        if len(message) > LARGEST_MESSAGE or not self._engine.is_free:
            return None
        if timeout is not None and timeout < self._least_timeout:
            return None
        return self._answer(caller, message, self._messages.read_request(message), arrival)

    def _answer(self, caller: Hashable, message: bytes, asked: Asked, arrival: float) -> Answered | None:
        engine, messages, requests = self._engine, self._messages, asked.requests
        if requests < 0:
            self._learn(message, asked.begin, asked.end)
        size = asked.request_bytes + asked.result_bytes
        if (
            requests <= 0
            or asked.cost > self._max_cost
            or asked.timeout < self._least_timeout * 1e9
            or asked.result_bytes > self._max_reply_bytes
            or not engine.has_room_for(caller, size, requests)
        ):
            return None
        begin = perf_counter()
        waited_ns = int((begin - arrival) * 1e9)
        decode_ns = waited_ns // requests
        queue_ns = waited_ns - decode_ns  # while the others were decoded
        try:
            compute_ns = messages.compute(asked, decode_ns, queue_ns)
        except (MemoryError, ArithmeticError):  # of NaN and infinities there is more to be known
            return None
        end = begin + compute_ns * 1e-9
        answer = messages.write()
        self._answers += 1
        work = None
        if self._answers % LEARNT_FROM == 1:
            work = Amount({messages.kind(asked): Part(requests, asked.cost, asked.largest)})
        engine.computed_at_once(caller, size, requests, work, begin, end)
        encode = (perf_counter() - end) / requests
        self._metrics.batch(requests, asked.flops, asked.tokens, 0.0, {NAME: requests})
        self._metrics.phases((decode_ns * 1e-9, queue_ns * 1e-9, 0.0, compute_ns * 1e-9, encode), requests)
        return Answered(answer, caller, requests, size, asked.tokens, asked.flops)

    def _learn(self, message: bytes, begin: int, end: int) -> None:
        """Looks at a request whose layout is not known. One that comes twice in a row is, from then on."""
        length = end - begin
        try:
            header, payloads = _wire.find(pb.AttendRequest, message, begin, end)
            if not self._has_come(length, header):
                return
            known = not pb.AttendRequest.FromString(header).caches
            if known:
                request = request_of(header, payloads, length, self._limits)
                known = request.cost <= self._max_cost and self._messages.learn(request, message, begin)
        except (DecodeError, InvalidRequest):  # others say what is wrong with it
            known = False
        if not known:
            self._leave(length)

    def _has_come(self, length: int, header: bytes) -> bool:
        """Whether the last request of this length that was looked at had this header."""
        seen = self._seen.pop(length, None)
        if seen is not None and seen.header == header:
            return True
        others = 0 if seen is None else seen.others + 1
        if others == PATIENCE or len(header) > MAX_KNOWN_HEADER:
            self._leave(length)
        else:
            if len(self._seen) >= MOST_LENGTHS:
                self._seen.clear()
            self._seen[length] = Seen(header, others)
        return False

    def _leave(self, length: int) -> None:
        """Leaves requests of a length to others, but for those of known layouts."""
        self._messages.leave(length)


def _are_new(ids: list[int], in_flight: Collection[int]) -> bool:
    """Whether no two calls have the same id, nor one that is in flight."""
    return len(set(ids)) == len(ids) and not any(each in in_flight for each in ids)
