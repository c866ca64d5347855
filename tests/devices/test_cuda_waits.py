"""What batches on a CUDA device wait for: only their own work, whatever others submit meanwhile; and how often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import messages
import numpy as np
import pytest
import torch

from attnserve_server.devices import cuda
from attnserve_server.devices.batch import run_batch
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.devices.transfers import Asked, CudaTransfers, _Thread
from attnserve_server.kernels import AttentionCall, AttentionResult, written_out


@dataclass
class Stream:
    """A stream: how much work was submitted to it, and how much of that has been waited for."""

    asked: int = 0
    waited: int = 0

    def wait_stream(self, other: Stream) -> None:
        """Orders what is submitted from now on, which is never waited for here."""


class Event:
    """An event on such streams."""

    def __init__(self, blocking: bool) -> None:
        assert blocking, "the thread is to sleep"

    def record(self, stream: Stream) -> None:
        self.stream, self.asked = stream, stream.asked

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.stream.waited = max(self.stream.waited, self.asked)


class StreamTransfers(CudaTransfers):
    """Transfers from the host to itself on such streams: each upload or fetch is submitted to one."""

    def __init__(self) -> None:
        self._compute_stream, self._fetch_stream = Stream(), Stream()  # type: ignore[assignment]
        self._thread = _Thread()
        self.streams: Sequence[Stream] = (self._compute_stream, self._fetch_stream)  # type: ignore[assignment]
        self.fetches = 0

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.streams[0].asked += 1
        return tensor.clone()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.streams[1].asked += 1
        self.fetches += 1
        self._thread.fetches = True
        return tensor.clone(memory_format=torch.contiguous_format)


class Pair(StreamTransfers):
    """Another batch submits more work whenever this one waits."""

    def asked(self) -> Asked:
        self.own = [stream.asked for stream in self.streams]
        return Asked(*(self._beside(wait) for wait in CudaTransfers.asked(self)))

    def _beside(self, wait: Callable[[], None]) -> Callable[[], None]:
        def waits() -> None:
            for stream in self.streams:
                stream.asked += 1
            wait()

        return waits


@pytest.fixture(autouse=True)
def _events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)


def test_a_batch_does_not_wait_for_what_another_asks_while_it_waits() -> None:
    """The next batch is staged while one computes: waiting for that too, both would end together, with none staged."""
    transfers = Pair()
    (result,) = run_batch([messages.read(messages.random_attend(0, 4))], transfers, ()).results
    assert result.output
    assert min(transfers.own) > 0
    assert [stream.waited for stream in transfers.streams] == transfers.own
    assert all(stream.asked > stream.waited for stream in transfers.streams)


def calls_of(count: int) -> list[AttentionCall]:
    """Calls of two sequences each; in every other call, the second sequence has non-finite values."""
    generator = torch.Generator().manual_seed(0)
    calls = []
    for n in range(count):
        query, key, value = (torch.randn(2, 1, 3, 4, generator=generator) for _ in range(3))
        if n % 2:
            value[1, 0, 2] = torch.nan
        calls.append(AttentionCall(query, key, value, 0.5, window=(-1, 0), return_lse=True))
    return calls


def quick(call: AttentionCall) -> AttentionResult:
    """A kernel that gets sequences with non-finite values wrong, and reports them as suspect."""
    exact = written_out.attend_each(call)
    suspect = ~call.value.isfinite().flatten(1).all(1)
    spoilt = exact.output.clone()
    spoilt[suspect] = torch.nan
    return AttentionResult(spoilt, exact.lse, None, "quick", suspect)


def test_calls_are_looked_at_together_and_only_what_is_suspect_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Excluded non-finite values reach no other row."""
    monkeypatch.setattr(cuda, "attend", quick)
    device = object.__new__(CudaDevice)
    device._transfers = transfers = StreamTransfers()
    device._kernel_calls = cuda._KernelCalls()
    calls = calls_of(5)
    for call, result in zip(calls, device.attend(calls, 0), strict=True):
        exact = written_out.attend_each(call)
        np.testing.assert_array_equal(result.output, exact.output)
        assert result.output[:, :, :2].isfinite().all()
        assert result.lse is not None
        np.testing.assert_array_equal(result.lse, exact.lse)
    assert transfers.fetches == 1, "of whether there is anything"
    assert transfers.streams[1].waited == 1
    assert device.take_kernel_calls() == {"quick": 5, written_out.NAME: 2}
    assert not device.take_kernel_calls()
    device.attend(calls_of(1), 0)
    assert device.take_kernel_calls() == {"quick": 1}, "nothing was computed again"


@pytest.mark.parametrize(("finite", "waits", "ran"), [(True, 1, 1), (False, 3, 2)])
def test_attentions_one_after_the_other_are_looked_at_when_all_have_been_asked(
    monkeypatch: pytest.MonkeyPatch, finite: bool, waits: int, ran: int
) -> None:
    """As in a layer; each second attention follows a first one, which is exact by then."""
    monkeypatch.setattr(cuda, "attend", quick)
    device = object.__new__(CudaDevice)
    device._transfers = transfers = StreamTransfers()
    device._kernel_calls = cuda._KernelCalls()
    begun: list[int] = []

    def layer(calls: Sequence[AttentionCall]) -> Sequence[AttentionResult]:
        begun.append(transfers.fetches)
        first = device.attend(list(calls), 0)
        return device.attend([replace(call, value=given.output) for call, given in zip(calls, first, strict=True)], 0)

    calls = calls_of(1 if finite else 2)
    results = device.share(layer, calls, [0] * len(calls))
    assert transfers.fetches == waits
    assert begun == [0, 1][:ran]
    for call, result in zip(calls, results, strict=True):
        exact = written_out.attend_each(replace(call, value=written_out.attend_each(call).output))
        np.testing.assert_array_equal(result.output, exact.output)


def test_what_fails_in_between_leaves_nothing_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "attend", quick)
    device = object.__new__(CudaDevice)
    device._transfers = transfers = StreamTransfers()
    device._kernel_calls = cuda._KernelCalls()

    def layer(calls: Sequence[AttentionCall]) -> Sequence[AttentionResult]:
        device.attend(list(calls), 0)
        raise MemoryError

    with pytest.raises(MemoryError):
        device.share(layer, calls_of(2), [0, 0])
    device.attend(calls_of(2), 0)
    assert transfers.fetches == 1, "at once, as outside of layers"


def test_without_anything_to_look_at_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "attend", written_out.attend_each)
    device = object.__new__(CudaDevice)
    device._transfers = transfers = StreamTransfers()
    device._kernel_calls = cuda._KernelCalls()
    device.attend(calls_of(2), 0)
    device.share(lambda calls: device.attend(list(calls), 0), calls_of(2), [0, 0])
    assert transfers.fetches == 0


def test_flags_of_what_is_shared_are_looked_at_when_all_has_been_asked() -> None:
    """And if any is true, where, when it is computed again."""
    device = object.__new__(CudaDevice)
    device._transfers = transfers = StreamTransfers()
    device._kernel_calls = cuda._KernelCalls()
    found: list[tuple[list[int], int]] = []

    def compute(items: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        found.append((device.flagged(items[0]), transfers.fetches))
        return items

    device.share(compute, [torch.tensor([False, False])], [0])
    assert found == [([], 0)]
    device.share(compute, [torch.tensor([False, True])], [0])
    assert found[1:] == [([], 1), ([1], 3)]


class Here(StreamTransfers):
    """Transfers whose computing needs no GPU."""

    def compute_here(self) -> None:
        pass


def trying(monkeypatch: pytest.MonkeyPatch, refuse: Exception, blame: str) -> CudaDevice:
    """A device on which the kernel for keys that lie anywhere fails, as a failure of this kind."""

    def load(device: torch.device) -> None:
        raise refuse

    monkeypatch.setattr(cuda, "load_scattered", load)
    device = object.__new__(CudaDevice)
    device._device, device._transfers, device._scatters = torch.device("cpu"), Here(), True
    monkeypatch.setattr(device, "blame", lambda error: blame)
    return device


def test_a_kernel_that_torch_refuses_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = trying(monkeypatch, RuntimeError("seqused_k is not supported"), "request")
    assert device.scattering is device
    device._try_scattered()
    assert device.scattering is None
    assert "seqused_k is not supported" in caplog.text


@pytest.mark.parametrize("blame", ["memory", "device"])
def test_a_device_that_is_lost_or_full_does_not_start(monkeypatch: pytest.MonkeyPatch, blame: str) -> None:
    device = trying(monkeypatch, RuntimeError("lost"), blame)
    with pytest.raises(RuntimeError, match="lost"):
        device._try_scattered()
