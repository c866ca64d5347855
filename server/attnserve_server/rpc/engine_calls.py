"""Unary calls that go through the engine, of whichever service: from the message to the reply.

In: a way to read a request from a message. Out: the handler of an RPC. What a call holds is released when its reply has
been sent, or when its caller has gone. Most messages take microseconds to read. But one that names thousands of
sequences, or layers of caches, takes milliseconds, and then its caller's next ones wait (`reading_turns.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeAlias

from attnserve_server.access.callers import Caller
from attnserve_server.errors import RequestError
from attnserve_server.host.loop_slices import SLICE_SECONDS
from attnserve_server.observability.metrics import Metrics, Operation
from attnserve_server.observability.usage import Usage
from attnserve_server.requests.work import Work
from attnserve_server.rpc.answers import encoded, unwanted
from attnserve_server.rpc.fast_path import Answered, FastPath
from attnserve_server.rpc.reading_turns import ReadingTurns
from attnserve_server.rpc.rpcs import Handler, Received, Rpcs, when_sent
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry, Outcome

ReadWhole: TypeAlias = Callable[[Caller, bytes], Work]
"""Reads a caller's request from a message. Raises RequestError."""


class _Begun(NamedTuple):
    """A call that has been submitted, its outcome, and its caller's usage."""

    entry: Entry
    outcomes: asyncio.Future[Outcome | RequestError]
    usage: Usage


class EngineCalls:
    """The unary calls through one engine."""

    def __init__(self, engine: Engine, metrics: Metrics, rpcs: Rpcs, reading_turns: ReadingTurns) -> None:
        self._engine = engine
        self._reading_turns = reading_turns
        self._metrics = metrics
        self._rpcs = rpcs

    def check_open(self) -> None:
        """Raises what any request would be refused with because the server is starting, ending or failed."""
        self._engine.check_open()

    def handler(
        self, operation: Operation, read: ReadWhole, fast_path: FastPath | None = None, *, in_turns: bool = False
    ) -> Handler:
        """The handler of a unary RPC whose requests go through the engine, unless the fast path has an answer. To read
        one `in_turns` may take long: it waits until the loop has turned for others. Others wait only if one of their
        caller's has just taken long.
        """
        answer = partial(self._answer, read, fast_path, in_turns)
        return self._rpcs.unary(operation, self._admit, answer)

    def _admit(self, caller: Caller) -> None:
        """Raises RequestError for one who may not use the service, or for whom there is no room."""
        caller.require("use")
        self._engine.check(caller.share, 0)

    async def _answer(self, read: ReadWhole, fast_path: FastPath | None, in_turns: bool, received: Received) -> bytes:
        """The reply to a unary call, which is released when it has been sent. Raises RequestError."""
        share = received.caller.share
        turn = self._reading_turns.of(share)
        must_wait = not turn.is_free if in_turns else turn.is_ahead
        if must_wait:
            held = self._engine.hold(share, len(received.message))
            try:
                await turn.wait()
            finally:
                self._engine.release(held)
        begin = perf_counter()
        try:
            begun = self._begin(read, fast_path, received, begin)
        finally:
            seconds = perf_counter() - begin
            if seconds >= SLICE_SECONDS:  # most take so little that to count it would take longer
                turn.read(seconds)
        return begun if isinstance(begun, bytes) else await self._reply(*begun)

    def _begin(self, read: ReadWhole, fast_path: FastPath | None, received: Received, begin: float) -> bytes | _Begun:
        """Reads the message of a call, from `begin` on. Returns the reply, if the fast path has one, or what has been
        submitted. Raises RequestError.
        """
        caller, message, arrival, timeout, trace = received
        learns, usage = False, self._metrics.usage.of(caller.name)
        if fast_path is not None and trace is None:
            answered = fast_path.answer_request(caller, message, arrival, timeout)
            if isinstance(answered, Answered):
                usage.computed(answered.query_tokens, answered.flops, answered.device_seconds)
                when_sent(partial(self._engine.release, answered))
                return answered.message
            learns = answered.learns
        self._engine.check(caller.share, len(message))
        request = read(caller, message)
        if learns and fast_path is not None:
            fast_path.learn_from(request, message, 0)
        outcomes: asyncio.Future[Outcome | RequestError] = asyncio.get_running_loop().create_future()

        def reply(entry: Entry, outcome: Outcome | RequestError) -> None:
            if outcomes.done():  # its caller has gone
                unwanted(entry, outcome, self._engine, usage)
            else:
                outcomes.set_result(outcome)

        deadline = float("inf") if timeout is None else arrival + timeout
        entry = Entry(request, reply, arrival, deadline, perf_counter() - begin, caller.share, trace)
        self._engine.submit(entry)
        return _Begun(entry, outcomes, usage)

    async def _reply(self, entry: Entry, outcomes: asyncio.Future[Outcome | RequestError], usage: Usage) -> bytes:
        """The reply to a call that has been submitted. Raises RequestError."""
        try:
            outcome = await outcomes
        except asyncio.CancelledError:
            self._engine.cancel((entry,))
            if outcomes.done() and not outcomes.cancelled():  # the outcome came as the caller went
                unwanted(entry, outcomes.result(), self._engine, usage)
            raise
        try:
            if isinstance(outcome, RequestError):
                raise outcome
            encoded_reply = encoded(entry, outcome, self._metrics, usage, lambda pieces, size: b"".join(pieces))
        except BaseException:
            self._engine.release(entry)
            raise
        when_sent(partial(self._engine.release, self._engine.answered(entry, len(encoded_reply))))
        return encoded_reply
