"""One stream of calls: requests in flight by their ids, replies as they finish.

A message may hold many calls. Replies leave through the outbox. Backpressure: nothing is read from a stream whose
caller does not read its replies, or that has too many calls unanswered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final

from google.protobuf.message import DecodeError
from grpc import aio

from attnserve_server.access.callers import Caller, Callers
from attnserve_server.errors import (
    CallerChanged,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Malformed,
    RepliesUnread,
    RequestError,
    error_for_caller,
)
from attnserve_server.no_room import NoRoom
from attnserve_server.observability.metrics import Metrics, Operation
from attnserve_server.observability.refusals import request_id_of
from attnserve_server.observability.tracing import Trace, Tracing, in_metadata
from attnserve_server.rpc.answers import encoded, unwanted
from attnserve_server.rpc.calls import ERROR_FIELD, LABELS, Call, Read, read_message, stream_reply
from attnserve_server.rpc.endings import Endings
from attnserve_server.rpc.fast_path import Declined, FastPath
from attnserve_server.rpc.outbox import Outbox, Unsent
from attnserve_server.rpc.reading_turns import ReadingTurns
from attnserve_server.rpc.rpcs import Context, when_sent
from attnserve_server.rpc.unread import UnreadReplies
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry, Outcome

MAX_UNSENT_BYTES: Final = 16 << 20
"""Nothing is read from a stream of whose replies more than this is unread."""

READ_AHEAD_SECONDS: Final = 0.005
"""How long calls may wait for the rest of their message to be read, so that they run in one batch with it."""

ATTENDED: Final = LABELS["attend"]
"""The label, in metrics and in the log, of calls that the fast path answers, and of a stream that is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What all streams of one service have in common."""

    engine: Engine
    """Runs the calls."""
    metrics: Metrics
    """Counts messages, and the phases of calls."""
    readers: Mapping[str, Read]
    """Read the requests, by the names of the fields that hold them."""
    callers: Callers
    """Identify the caller again once the callers file has changed."""
    max_message_calls: int
    """The most calls in a message."""
    max_unanswered: int
    """Nothing is read from a stream that has more calls than this unanswered."""
    max_shared_bytes: int
    """In a message that is longer than this, a call that is less than a third of it gets a copy of its bytes, and does
    not keep the message. Otherwise a call of a few bytes, for which there is room, could keep a message of any length
    in memory for as long as it waits.
    """
    endings: Endings
    """Takes note of how calls end."""
    reading_turns: ReadingTurns
    """When the streams of one caller may read their messages."""
    tracing: Tracing | None
    """Records the calls; None if nothing does."""
    fast_path: FastPath | None
    """Answers messages as a whole, unless calls are recorded; None if nothing does."""
    unread: UnreadReplies
    """Ends streams whose replies are not read."""


class CallStream:
    """One AttendStream RPC of a caller that may use the service."""

    def __init__(self, streams: Streams, caller: Caller, context: Context) -> None:
        self._streams = streams
        self._engine = streams.engine
        self._metrics = streams.metrics
        self._edition = streams.callers.edition
        self._caller = caller
        self._usage = streams.metrics.usage.of(caller.name)
        self._context = context
        self._parent = None if streams.tracing is None else in_metadata(context.invocation_metadata())
        self._fast_path = streams.fast_path if streams.tracing is None else None  # it keeps no traces
        self._learns = False
        """Whether the requests of the message that is being read may teach the fast path a layout."""
        self._id: str | None = None
        self._in_flight: dict[int, Entry] = {}
        self._outbox = Outbox(context, streams.engine, streams.metrics, streams.unread)
        self._reading_turn = streams.reading_turns.of(caller.share)
        self._turn_begin = 0.0
        """When reading a message began, or when the loop last turned meanwhile."""
        self._reader: asyncio.Task[None] | None = None
        self._receiving = False
        """Whether a message has come and is not read completely: `end` does not interrupt that."""
        self._ended = False
        """Whether `end` was called: no further message is read."""
        self._gone = False
        """Whether the RPC is over: nobody waits for outcomes any longer."""
        self._retiring: asyncio.TimerHandle | None = None
        """Calls `end` after the grace of `retire`."""

    async def serve(self) -> None:
        """Serves the stream to its end. Raises RequestError if the caller sends a malformed message, or does not read
        its replies.
        """
        await self._begin()
        self._reader = asyncio.create_task(self._read())
        if self._ended:  # before there was a reader to cancel
            self._reader.cancel()
        whole = asyncio.create_task(self._read_and_drain(self._reader))
        try:
            await asyncio.wait((whole, self._outbox.broken), return_when=asyncio.FIRST_COMPLETED)
            if self._outbox.broken.done():
                self._outbox.broken.result()
            whole.result()
        except RepliesUnread:
            self._streams.unread.bid_farewell(self._context.peer())
            raise
        finally:
            self._gone = True
            if self._retiring is not None:
                self._retiring.cancel()
            self._engine.cancel(self._in_flight.values())
            self._in_flight.clear()  # their replies refer to this: the cycle would keep messages
            self._outbox.close()
            if kept := self._outbox.kept:
                when_sent(partial(self._engine.release, *kept))
            tasks = (whole, self._reader)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, self._outbox.broken, return_exceptions=True)

    async def _begin(self) -> None:
        """Sends gRPC's headers at once. Otherwise they would go with the first reply, and while that is being sent, no
        error could be sent after it.
        """
        try:
            await self._context.send_initial_metadata(())
        except aio.InternalError:
            raise Cancelled from None

    @property
    def _unanswered(self) -> int:
        """How many calls have been read whose replies are not being written yet."""
        return len(self._in_flight) + self._outbox.replies

    def retire(self, grace: float) -> None:
        """Asks the caller to make further calls on another stream and to close this one. If it is still open after
        `grace` seconds, it is ended as by `end`.
        """
        self._outbox.ask_to_close()
        if self._retiring is None:
            self._retiring = asyncio.get_running_loop().call_later(grace, self.end)

    def end(self) -> None:
        """Stops reading, as if the caller had no more calls to make. The calls of messages that have come are still
        answered.
        """
        self._ended = True
        if self._reader is not None and not self._receiving:
            self._reader.cancel()

    async def _read_and_drain(self, reader: asyncio.Task[None]) -> None:
        """Ends when nothing more is read and every reply has been sent."""
        await asyncio.wait((reader,))
        if not reader.cancelled():
            reader.result()
        while self._in_flight or self._outbox.bytes:
            await self._progress()

    async def _read(self) -> None:
        """Reads messages, one after the other, until there are no more or `end` is called."""
        while True:
            message = await self._context.read()
            if not isinstance(message, bytes):  # EOF
                return
            arrival = perf_counter()
            self._metrics.received(len(message))
            if self._streams.callers.edition is not self._edition:
                self._look_again()
            self._receiving = True
            self._turn_begin = arrival
            if not self._reading_turn.is_free:
                await self._reading_turn.wait()
                self._turn_begin = perf_counter()
            self._reading_turn.begin()
            self._outbox.hold()
            try:
                if not self._answer_at_once(message, arrival):
                    try:
                        await self._receive(message, arrival)
                    finally:
                        self._engine.hurry()
            finally:
                self._receiving = False
                self._outbox.write()  # at once: else ready replies leave a turn of the loop later
                self._reading_turn.end(perf_counter() - self._turn_begin)
            if self._ended:
                return
            del message  # it may be large, and the next one long in coming
            while self._outbox.bytes > MAX_UNSENT_BYTES or self._unanswered > self._streams.max_unanswered:
                await self._progress()

    async def _progress(self) -> None:
        """Waits until some replies have been sent."""
        self._outbox.progress.clear()
        await self._outbox.progress.wait()

    def _look_again(self) -> None:
        """Checks that the caller is still the same, and may still use the service. Raises CallerChanged if not."""
        self._edition = self._streams.callers.edition
        try:
            caller = self._streams.callers.identify(self._context)
            caller.require("use")
        except RequestError:
            raise CallerChanged from None
        if caller.name != self._caller.name:
            raise CallerChanged

    def _answer_at_once(self, message: bytes, arrival: float) -> bool:
        """Answers a message as a whole, if the fast path has an answer to it."""
        if self._fast_path is None:
            return False
        answered = self._fast_path.answer_message(self._caller, message, arrival, self._in_flight)
        if isinstance(answered, Declined):
            self._learns = answered.learns
            return False
        self._streams.endings.ended(ATTENDED, "OK", arrival, requests=answered.requests)
        self._usage.computed(answered.query_tokens, answered.flops, answered.device_seconds, answered.requests)
        self._outbox.put(Unsent([answered.message], len(answered.message), answered, answered.requests))
        return True

    async def _receive(self, message: bytes, arrival: float) -> None:
        """Starts the calls of a message. It may hold thousands of tiny ones. So the loop turns for others when the
        caller's turn is over, and what has been read so far begins to run after `READ_AHEAD_SECONDS`.
        """
        try:
            cancelled, calls = read_message(message, self._streams.max_message_calls)
        except DecodeError as error:
            raise Malformed("", error) from None
        if cancelled:
            self._engine.cancel([self._in_flight[call_id] for call_id in cancelled if call_id in self._in_flight])
        begin = hurried = self._turn_begin
        for call in calls:
            if self._reading_turn.is_over(begin - self._turn_begin):
                if begin - hurried > READ_AHEAD_SECONDS:
                    self._engine.hurry()
                    hurried = begin
                self._outbox.write()
                try:
                    await self._reading_turn.pause(begin - self._turn_begin)
                finally:  # to wait is not to read, even if the stream ends meanwhile
                    begin = self._turn_begin = perf_counter()
                self._outbox.hold()
            trace = None
            if self._streams.tracing is not None:
                trace = self._streams.tracing.begin(call.label, call.parent or self._parent, arrival)
            try:
                refusal = self._start(call, arrival, begin, trace)
            except Exception as error:
                self._answer_error(call.id, call.label, error_for_caller(error), arrival, None, trace)
            else:
                if refusal is not None:
                    self._answer_error(call.id, call.label, refusal, arrival, None, trace)
            begin = perf_counter()

    def _start(self, call: Call, arrival: float, begin: float, trace: Trace | None) -> NoRoom | None:
        """Submits a call whose decoding began at `begin`, if there is room. Raises RequestError."""
        if call.id in self._in_flight:
            raise InvalidRequest("id", "a number that no call in flight has", call.id, reason="DUPLICATE_ID")
        if call.error is not None:
            raise call.error
        if call.operation is None:
            raise InvalidRequest("operation", "one of the operations", "nothing")
        deadline = float("inf")
        if call.timeout is not None:
            if call.timeout <= 0:
                raise DeadlineExceeded
            deadline = arrival + call.timeout
        message, begin_at, end_at = call.request
        size = end_at - begin_at
        if (refusal := self._engine.refusal(self._caller.share, size)) is not None:
            return refusal
        if 3 * size < len(message) > self._streams.max_shared_bytes:
            message, begin_at, end_at = message[begin_at:end_at], 0, size
        request = self._streams.readers[call.operation](self._caller, message, begin_at, end_at)
        if self._learns and self._fast_path is not None:
            self._fast_path.learn_from(request, message, begin_at)
        reply = partial(self._answer, call.id, call.label)
        entry = Entry(request, reply, arrival, deadline, perf_counter() - begin, self._caller.share, trace)
        self._engine.take(entry)
        self._in_flight[call.id] = entry
        return None

    def _answer(self, call_id: int, label: Operation, entry: Entry, outcome: Outcome | RequestError) -> None:
        """Puts the reply to an admitted call into the outbox."""
        if self._gone:
            unwanted(entry, outcome, self._engine, self._usage)
            self._streams.endings.ended(label, Cancelled.code.name, entry.arrival, entry.trace)
            return
        self._in_flight.pop(call_id, None)
        if isinstance(outcome, RequestError):
            self._answer_error(call_id, label, outcome, entry.arrival, entry, entry.trace)
            return
        framed = partial(stream_reply, call_id, entry.request.reply_field)
        pieces, size = encoded(entry, outcome, self._metrics, self._usage, framed)
        self._streams.endings.ended(label, "OK", entry.arrival)
        self._outbox.put(Unsent(pieces, size, self._engine.answered(entry, size)))

    def _answer_error(
        self,
        call_id: int,
        label: Operation,
        error: RequestError | NoRoom,
        arrival: float,
        entry: Entry | None,
        trace: Trace | None,
    ) -> None:
        """Answers a call with an error, by way of the outbox. `entry` is None if the call was not admitted."""
        self._streams.endings.ended(label, error.code.name, arrival, trace)
        self._streams.endings.refused(label, error, self._caller, lambda: self._request_id(call_id))
        status = error.encoded_status()
        pieces, size = stream_reply(call_id, ERROR_FIELD, [status], len(status))
        held = None if entry is None else self._engine.answered(entry, size)
        self._outbox.put(Unsent(pieces, size, held))

    def _request_id(self, call_id: int) -> str:
        """A call's id in the log: the stream's id and its own."""
        if self._id is None:
            self._id = request_id_of(self._context)
        return f"{self._id}/{call_id}"
