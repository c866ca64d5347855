"""Transfers on recorded streams: what one stream reads has been written by then, whatever stream wrote it, and memory
that another stream than its own uses is not reused before that is done with it.

A stream knows how much of its own work and of others' comes before its next operation; nothing else is ordered.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from typing import Any, ClassVar

import pytest
import torch

from attnserve_server.devices import transfers as transfers_module
from attnserve_server.devices.transfers import MAX_PINNED, WARM_BLOCKS, WARM_POWERS, CudaTransfers


class Stream:
    """A stream, and up to which of its operations each other stream is waited for."""

    def __init__(self, *_: object) -> None:
        self.behind: dict[Stream, int] = {self: 0}

    def operate(self) -> int:
        self.behind[self] += 1
        return self.behind[self]

    def wait_stream(self, other: Stream) -> None:
        for stream, count in other.behind.items():
            self.behind[stream] = max(self.behind.get(stream, 0), count)


class Memory:
    """Device memory, allocated and first written on the current stream, or host memory."""

    dtype, shape, nbytes = torch.float32, (3,), 12

    def __init__(self, home: Stream | None) -> None:
        self.home, self.users = home, {home}
        self.recorded = {home}
        self.writer, self.written = home, 0 if home is None else home.operate()

    def used_by(self, stream: Stream) -> None:
        """A stream reads it."""
        assert self.writer is None or stream.behind.get(self.writer, 0) >= self.written, "it may not be there yet"
        self.users.add(stream)

    def record_stream(self, stream: Stream) -> None:
        self.recorded.add(stream)

    @property
    def is_kept(self) -> bool:
        """Whether it is kept for all its users once it is freed."""
        return self.users <= self.recorded


class Machine:
    """The streams, and what is in memory."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.there: list[Memory] = []

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def new(self) -> Memory:
        memory = DeviceMemory(self)
        self.there.append(memory)
        return memory


class DeviceMemory(Memory):
    """A tensor on the device."""

    def __init__(self, machine: Machine, packed: bool = True) -> None:
        super().__init__(machine.current)
        self._machine, self._packed = machine, packed

    def contiguous(self) -> Memory:
        if self._packed:
            return self
        self.used_by(self._machine.current)
        return self._machine.new()


class HostMemory(Memory):
    """Pinned memory."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(None)
        self._machine = machine

    def to(self, device: torch.device, non_blocking: bool) -> Memory:
        assert non_blocking
        self.used_by(self._machine.current)
        return self._machine.new()

    def view(self, *_: object) -> HostMemory:
        return self

    def copy_(self, source: Memory, non_blocking: bool) -> HostMemory:
        assert non_blocking
        source.used_by(self._machine.current)
        self.writer, self.written = self._machine.current, self._machine.current.operate()
        return self


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine in the place of torch's streams."""
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: machine.default)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", machine.stream)
    return machine


@pytest.mark.parametrize("packed", [True, False])
def test_streams_read_what_is_there_and_keep_what_they_use(
    machine: Machine, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches, the second one staged before the first one's results are fetched."""
    monkeypatch.setattr(transfers_module, "AT_ONCE", 0)
    transfers: Any = CudaTransfers(torch.device("cuda", 0))
    monkeypatch.setattr(transfers, "allocate", lambda size: HostMemory(machine))
    inputs = [transfers.upload(HostMemory(machine)) for _ in range(2)]
    fetched = []
    for each in inputs:
        assert each.home is not machine.default, "or copies would wait for what computes"
        each.used_by(machine.current)
        output = DeviceMemory(machine, packed)
        machine.there.append(output)
        fetched.append(transfers.fetch(output))
    assert all(memory.is_kept for memory in machine.there)
    assert {memory.writer for memory in fetched} == {transfers._fetch_stream}
    for memory in fetched:
        memory.used_by(transfers._fetch_stream)  # as a thread does that waits for this stream


def test_copies_to_the_device_wait_for_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what computes does not wait for copies back."""
    monkeypatch.setattr(transfers_module, "AT_ONCE", 0)
    transfers: Any = CudaTransfers(torch.device("cuda", 0))
    monkeypatch.setattr(transfers, "allocate", lambda size: HostMemory(machine))
    for _ in range(3):
        transfers.upload(HostMemory(machine)).used_by(machine.current)
        transfers.fetch(machine.new())
    assert transfers._upload_stream.behind.keys() == {transfers._upload_stream}
    assert transfers._fetch_stream not in machine.default.behind


class Event:
    """An event that can be waited for, and is reached when it has been looked at so many times."""

    looks: ClassVar[float]
    waited: ClassVar[list[tuple[Stream, int]]]
    slept: ClassVar[int]

    def __init__(self, blocking: bool) -> None:
        assert blocking, "the thread is to sleep"
        self._left = Event.looks

    def record(self, stream: Stream) -> None:
        self.place = stream, stream.behind[stream]

    def query(self) -> bool:
        self._left -= 1
        if self._left < 0:
            Event.waited.append(self.place)
        return self._left < 0

    def synchronize(self) -> None:
        Event.waited.append(self.place)
        Event.slept += 1


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    """Events in the place of torch's; nobody has waited for any."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.looks, Event.waited, Event.slept = 0, [], 0
    return Event


@pytest.mark.parametrize(("looks", "awake", "slept"), [(0, 0.0, 0), (3, inf, 0), (inf, 1e-6, 1)])
def test_a_thread_that_waits_for_long_sleeps(
    machine: Machine, events: type[Event], monkeypatch: pytest.MonkeyPatch, looks: float, awake: float, slept: int
) -> None:
    events.looks = looks
    monkeypatch.setattr(transfers_module, "AWAKE_S", awake)
    transfers: Any = CudaTransfers(torch.device("cuda", 0))
    transfers.asked().until_computed()
    assert (len(events.waited), events.slept) == (1, slept)


@pytest.mark.parametrize("large_first", [True, False])
def test_all_that_was_fetched_is_there_whatever_its_size(
    machine: Machine, events: type[Event], monkeypatch: pytest.MonkeyPatch, large_first: bool
) -> None:
    """What is little is not copied back on the stream on which what is much is."""
    transfers: Any = CudaTransfers(torch.device("cuda", 0))
    monkeypatch.setattr(transfers, "allocate", lambda size: HostMemory(machine))
    fetched = []
    for is_large in (large_first, not large_first):
        monkeypatch.setattr(transfers_module, "AT_ONCE", 0 if is_large else 12)
        fetched.append(transfers.fetch(machine.new()))
    assert len({memory.writer for memory in fetched}) == 2
    transfers.asked().until_fetched()
    ((stream, _),) = events.waited
    for memory in fetched:
        memory.used_by(stream)


@pytest.mark.parametrize(("at_once", "stream"), [(12, "_compute_stream"), (11, "_fetch_stream")])
def test_what_is_little_is_copied_between_kernels(
    machine: Machine, events: type[Event], monkeypatch: pytest.MonkeyPatch, at_once: int, stream: str
) -> None:
    """And is there once what computes has got that far: nothing else is waited for, also if another thread has much
    copied back.
    """
    monkeypatch.setattr(transfers_module, "AT_ONCE", at_once)
    transfers: Any = CudaTransfers(torch.device("cuda", 0))
    monkeypatch.setattr(transfers, "allocate", lambda size: HostMemory(machine))
    uploaded = transfers.upload(HostMemory(machine))
    assert (uploaded.home is machine.default) == (stream == "_compute_stream")
    fetched = transfers.fetch(machine.new())
    transfers.asked().until_fetched()
    ((waited, _),) = events.waited
    assert waited is getattr(transfers, stream)
    fetched.used_by(waited)
    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: setattr(transfers._thread, "fetches", True)).result()
    transfers.asked().until_fetched()
    assert events.waited[-1][0] is machine.default


@pytest.mark.parametrize(("size", "pinned"), [(0, False), (1, True), (MAX_PINNED, True), (MAX_PINNED + 1, False)])
def test_memory_is_pinned_unless_it_is_none_or_too_much(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, size: int, pinned: bool
) -> None:
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: asked.append((size, pin_memory)))
    CudaTransfers(torch.device("cuda", 0)).allocate(size)
    assert asked == [(size, pinned)]


def test_every_thread_computes_on_the_device_when_told_to(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    transfers = CudaTransfers(torch.device("cuda", 1))
    transfers.compute_here()
    with ThreadPoolExecutor(1) as other:
        other.submit(transfers.compute_here).result()
    assert chosen == [torch.device("cuda", 1)] * 2


def test_warm_memory_is_all_had_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the same block would be had again and again; on the device, on each stream that memory comes from."""
    blocks: weakref.WeakSet[HostMemory] = weakref.WeakSet()
    sizes: Counter[int] = Counter()
    streams: list[Stream] = []

    def allocate(size: int) -> HostMemory:
        blocks.add(block := HostMemory(machine))
        sizes[size] += 1
        return block

    def empty(size: int, **_: object) -> Memory:
        assert len(blocks) == sizes.total()
        streams.append(machine.current)
        return DeviceMemory(machine)

    transfers: Any = CudaTransfers(torch.device("cuda", 0))
    monkeypatch.setattr(transfers, "allocate", allocate)
    monkeypatch.setattr(torch, "empty", empty)
    transfers.warm_up()
    assert sizes == {1 << power: WARM_BLOCKS for power in WARM_POWERS}
    assert streams == [machine.default, transfers._upload_stream]
    assert not blocks
