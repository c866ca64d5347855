"""A request in flight, with all that is needed of it later, and the way back to its caller."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeAlias

from attnserve_server.errors import RequestError
from attnserve_server.requests.work import Phases, RequestResult, Work

if TYPE_CHECKING:
    from attnserve_server.observability.tracing import Trace


class Outcome(NamedTuple):
    """The outcome of a request that ran: its result, its phases, and the size of its batch. `Phases.encode` is only the
    time of the fetch so far.
    """

    result: RequestResult
    phases: Phases
    batch_size: int


class Held(Protocol):
    """What admission counts for a caller until a reply has been sent: a number of requests, and their bytes."""

    @property
    def caller(self) -> Hashable:
        """Whose it is."""

    @property
    def requests(self) -> int:
        """How many."""

    @property
    def size(self) -> int:
        """Their bytes."""


class StillHeld(NamedTuple):
    """What admission counts for a request whose reply is being sent. Unlike the entry, it does not keep the request and
    the results of its batch in memory.
    """

    caller: Hashable
    requests: int
    size: int


Reply: TypeAlias = Callable[["Entry", Outcome | RequestError], None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry:
    """A request in flight: what to compute, what that costs, how long its caller waits, and the way back.

    `caller` tells callers apart (`Caller.share`); `trace` is there if the request is recorded. Times are of
    `time.perf_counter`. `reply` is called once, on the event loop: with `Cancelled` if the entry was cancelled before
    it ran. If it raises an exception when it is given an outcome, it is called once more, with an error.
    """

    requests: ClassVar[int] = 1
    """As `Held`: an entry is one request."""

    request: Work
    reply: Reply
    arrival: float
    deadline: float
    decode: float
    caller: Hashable
    trace: Trace | None
    cancelled: bool = field(default=False, init=False)
    answered: bool = field(default=False, init=False)
    device_seconds: float = field(default=0.0, init=False)
    """Its share of the time that the device took for the batches that it was in."""
    kind: str = field(init=False)
    """The kind of work: how long work takes is learnt per kind."""
    cost: int = field(init=False)
    """What it costs to run, in FLOPs."""
    size: int = field(init=False)
    """The most bytes that it takes until its reply has been sent: the message, what computing takes and the reply, or
    later twice the reply, while that is being sent (`Engine.answered`).
    """

    def __post_init__(self) -> None:
        """Counts what the request takes."""
        self.count()

    def count(self) -> None:
        """Counts what the request takes, as far as is known now."""
        request = self.request
        self.kind, self.cost, reply = request.kind, request.extent.cost, request.extent.reply_bytes
        self.size = max(request.received_bytes + reply + request.scratch_bytes, 2 * reply)

    @property
    def group(self) -> Hashable:
        """Equal for entries that one batch can hold."""
        return self.request.group

    @property
    def layer(self) -> str | None:
        """The name of the layer that it applies; None for attention."""
        return self.request.layer

    @property
    def received_bytes(self) -> int:
        """What it holds in memory."""
        return self.request.received_bytes

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.request.priority
