"""The messages of unary calls: how many calls may wait for theirs, and how long.

In: RPCs that have begun. Out: their messages. A caller decides when its message comes, and whether; until then the call
takes some 20 KiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Final

from grpc import aio

from attnserve_server.errors import InvalidRequest, Overloaded
from attnserve_server.no_room import too_many_unsent
from attnserve_server.rpc.equal_timeouts import EqualTimeouts
from attnserve_server.rpc.open_rpcs import OpenRpcs

CROWDED_S: Final = 0.5
"""How many seconds a message may take if only few may take longer, and as many as may are doing so."""

CANCELLED_WITHIN_S: Final = 1.0
"""How long a call that gets no message may take to be cancelled. If it is not cancelled, it is told that the message is
missing.
"""


class MessagesDue:
    """The unary calls that wait for their messages: at most `most_of_one` of one caller and `most_of_all` of all, each
    for at most `max_time` seconds (None is no bound). If `unhurried` is given, only as many as it has room for may take
    that time; others may take `CROWDED_S`.
    """

    def __init__(
        self,
        most_of_one: int,
        most_of_all: int,
        max_time: float | None,
        unhurried: OpenRpcs | None = None,
    ) -> None:
        self._waiting = OpenRpcs(most_of_one, most_of_all, too_many_unsent)
        self._timeouts = EqualTimeouts(max_time)
        self._crowded = EqualTimeouts(CROWDED_S)
        self._unhurried = unhurried

    async def message(self, context: aio.ServicerContext[bytes, bytes], share: Hashable | None) -> bytes:
        """The message of a unary call to a handler that takes a stream of them.

        Raises InvalidRequest if none comes, and Overloaded if too many calls wait for theirs. What has come of a
        message that is late is let go with its call.
        """
        self._waiting.begin(share)
        try:
            if self._unhurried is None:
                return await _message(context, self._timeouts)
            try:
                self._unhurried.begin(share)
            except Overloaded as crowded:
                return await _message(context, self._crowded, crowded)
            try:
                return await _message(context, self._timeouts)
            finally:
                self._unhurried.end(share)
        finally:
            self._waiting.end(share)


async def _message(
    context: aio.ServicerContext[bytes, bytes], timeouts: EqualTimeouts, late: Overloaded | None = None
) -> bytes:
    """The message, in time. Raises InvalidRequest, or `late` if it takes longer."""
    try:
        message = await timeouts.of(context.read())
    except TimeoutError:
        raise late or _missing(f"a message within {timeouts.seconds:g} s") from None
    if isinstance(message, bytes):
        return message
    # The call sends no more. Mostly that means that it has been cancelled, by its caller or, if the message is too
    # large, by gRPC. The cancellation reaches this task by another way, and ends it here.
    await asyncio.sleep(CANCELLED_WITHIN_S)
    raise _missing("a message")


def _missing(expected: str) -> InvalidRequest:
    return InvalidRequest("", expected, "none", "MALFORMED_MESSAGE")
