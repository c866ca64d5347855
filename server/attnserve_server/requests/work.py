"""What the engine must know of any request, and the result of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from attnserve._fields import Buffer

if TYPE_CHECKING:
    from attnserve_server.devices import Device


Item = TypeVar("Item")
Found = TypeVar("Found")


def completed(
    items: Sequence[Item], found: Sequence[Found | None], compute: Callable[[list[Item]], Sequence[Found]]
) -> list[Found]:
    """The result of each item: the one that was found or, if that is None, what `compute` gives for it. `compute` is
    called once, with all such items, unless there are none.
    """
    lacking = [item for item, result in zip(items, found, strict=True) if result is None]
    rest = iter(compute(lacking) if lacking else ())
    return [next(rest) if result is None else result for result in found]


class Phases(NamedTuple):
    """How long each phase of a request took, in seconds."""

    decode: float
    queue: float
    staging: float
    compute: float
    encode: float


@dataclass(slots=True)
class RequestResult:
    """The elements of a reply's tensors, packed and in the order in which they are sent."""

    output: memoryview
    lse: memoryview | None
    scores: memoryview | None


@dataclass(slots=True)
class BatchResult:
    """The results of a batch, one per request in its order, and where the time went (seconds).

    `padding` is the share of its rows that belong to no request. `again` has the requests whose results are incomplete,
    by their places: each in the form in which it runs once more, in a batch of its own group.
    """

    results: list[RequestResult]
    staging: float
    compute: float
    fetch: float
    padding: float = 0.0
    kernel_calls: Mapping[str, int] = field(default_factory=dict)
    again: Mapping[int, Work] = field(default_factory=dict)

    def with_found(
        self, found: Sequence[RequestResult | None], compute: float, again: Mapping[int, Work]
    ) -> BatchResult:
        """The result of the whole batch, of which this is the part that `found` lacks. Computing `found` took `compute`
        seconds, and left some requests to run `again`.
        """
        results = completed(found, found, lambda _: self.results)
        return replace(self, results=results, compute=self.compute + compute, again=again)


Finish: TypeAlias = Callable[[], BatchResult]
"""Waits for a batch that has been launched, and gives its results; on any thread, once."""


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """How much a request is."""

    flops: int
    """The floating-point operations that it asks for."""
    cost: int
    """What it costs to compute, in FLOPs of plain attention: those that it asks for, weighted by how slow they are, and
    the overhead of its kernel calls.
    """
    query_tokens: int
    """Rows of queries, over all sequences."""
    reply_bytes: int
    """The bytes of the reply's tensors."""


class Work(Protocol):
    """One request, decoded and checked. Kinds of requests that derive from it have the defaults of one that needs
    nothing for itself.
    """

    __slots__ = ()

    reply_field: ClassVar[int]
    """The field of `AttendStreamReply` that holds its reply."""

    received_bytes: int
    """The bytes of the request."""

    extent: Extent
    """How much it is, as far as is known now."""

    @property
    def needs(self) -> Sequence[Hashable]:
        """The things that it needs for itself while it runs, such as caches: requests that need the same one run in
        order of arrival. The four methods below are called only if there are any, all on the event loop.
        """
        return ()

    @property
    def shares(self) -> bool:
        """Whether it leaves those things unchanged, and can have them together with others that do."""
        return True

    @property
    def computes(self) -> bool:
        """Whether there is anything to compute or to copy. If not, it runs on the event loop as soon as its turn has
        come, whatever the device does meanwhile.
        """
        return True

    def enter(self) -> None:
        """Called once it is admitted and before it waits. Raises RequestError if it may not."""
        return

    def begin(self) -> None:
        """Called before it runs: its turn has come, and its cost is now certain. Raises RequestError if it cannot."""
        return

    def end(self, failed: bool) -> None:
        """Called after `begin`, when it has run or failed to."""
        return

    def leave(self) -> None:
        """Called after `enter`, when it is done with, whether it ran or not."""
        return

    @property
    def layer(self) -> str | None:
        """The name of the layer that it applies; None for attention."""
        return None

    @property
    def group(self) -> Hashable:
        """Equal for requests that one batch can hold."""

    @property
    def kind(self) -> str:
        """Equal for requests that are computed about equally fast, FLOP for FLOP: how long they take is learnt per
        kind. There are few kinds, whatever callers ask for.
        """

    @property
    def priority(self) -> int:
        """Higher goes first."""

    @property
    def scratch_bytes(self) -> int:
        """Further memory that computing it takes, if worth counting."""
        return 0

    def run_batch(self, device: Device, batch: Sequence[Self]) -> BatchResult:
        """Computes a batch of requests of this one's group. No result depends on the others."""

    def launch_batch(self, device: Device, batch: Sequence[Self]) -> Finish | None:
        """Launches such a batch on a device that launches (`Device.launch_bytes`), without waiting for it; None if that
        cannot be done without waiting. If this fails, or `Finish` does, `run_batch` can still compute the batch.
        """
        return None

    def encode(self, result: RequestResult, phases: Phases, batch_size: int) -> tuple[list[Buffer], int]:
        """The pieces of the encoded reply, and their total length."""
