"""Batches of requests to caches on a device with a kernel for keys that lie anywhere, against the oracle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic
from typing import Any

import accuracy
import numpy as np
import pytest
import torch
from cached_cases import by_sequence, last
from caller import Reference, attend_request, result
from cases import Case, Plan
from kernel_calls import tensor
from limits import LIMITS
from meta_device import CUDA, META, MetaTransfers, NothingWaits, Operations, hollow, hollow_device
from resident import CPU, stored
from scattering import HALF, ScatteringDevice, device
from stores import store_of

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import anybody
from attnserve_server.caches import run as run_module
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.request import CachedRequest, read_attend
from attnserve_server.caches.run import launch_batch, run_batch
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.work import CacheHost
from attnserve_server.devices import Device
from attnserve_server.kernels import varlen_cuda
from attnserve_server.requests.work import BatchResult, Phases

__all__ = ["device"]

PAGES, PAGE_BYTES = 200, 4096
PLAN = Plan(batch=3, key_heads=2, group=2, query_length=1, key_length=70, head_dim=16, key_dim=16, value_dim=16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "length first": {"layout": "length_first"},
    "one sequence of rank 3": {"batch": 1, "rank": 3, "causal": "bottom_right"},
    "lengths": {"kv_lengths": (9, 70, 33), "causal": "bottom_right"},
    "window": {"causal": "bottom_right", "window": (40, -1)},
    "sinks": {"causal": "bottom_right", "sinks": True},
    "two queries, to everything": {"query_length": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "bias": {"bias_shape": (70,)},
    "two queries, causal": {"query_length": 2, "causal": "bottom_right"},
    "nothing to attend to for one": {"kv_lengths": (0, 70, 5)},
    "softcap": {"softcap": 3.0},
}


class Bench:
    """Caches on a device, and requests to them."""

    def __init__(self, device: Device, where: torch.device = CPU) -> None:
        self.device = device
        self.store = store_of(PAGES, page_bytes=PAGE_BYTES)
        self.host = CacheHost(self.store, PagePool(PAGES * PAGE_BYTES, PAGE_BYTES, where, None), "")

    def request(self, case: Case, dtype: str, appended: int) -> CachedRequest:
        """A request to new caches with the keys and values of a case, the last of which it appends."""
        key, value = by_sequence(case)
        length = key.shape[2]
        shape = CacheShape(key.shape[1], key.shape[3], value.shape[3], 1, dtype)  # type: ignore[arg-type]
        references = []
        for b in range(len(key)):
            cache = self.store.create(shape, None, monotonic())
            reservation = self.store.reserve([(cache, 0, length - appended)], 0.0)
            own = (tensor(part[b, :, : length - appended]) for part in (key, value))
            placement = self.store.place(reservation, 0.0)[0]
            if self.device.torch_device == CPU:
                self.host.pages.write(shape, placement, *own)
            self.store.cancel(reservation)
            references.append(Reference(cache.name))
        pair = last(case, [length] * len(key), appended) if appended else None
        data = attend_request(case, references, pair, return_lse=True).SerializeToString()
        request = read_attend(self.host, anybody("here"), data, 0, len(data), LIMITS)
        assert isinstance(request, CachedRequest)
        return request

    def begun(self, case: Case, appended: int) -> CachedRequest:
        """Such a request whose turn has come."""
        request = self.request(case, str(case.query.dtype), appended)
        request.enter()
        request.begin()
        return request

    def check(self, cases: list[Case], requests: list[CachedRequest]) -> dict[str, int]:
        """Asserts that the replies to a batch are right; returns which kernels ran."""
        for request in requests:
            request.enter()
            request.begin()
        batch = run_batch(self.host.pages, self.device, requests)
        for case, request, found in zip(cases, requests, batch.results, strict=True):
            request.end(False)
            request.leave()
            pieces, _ = request.encode(found, Phases(0, 0, 0, 0, 0), 1)
            accuracy.check(case, result(pb.AttendResponse.FromString(b"".join(pieces))))
        return batch.kernel_calls


@HALF
@pytest.mark.parametrize("appended", [0, 1, 5])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_batch_is_one_call(device: ScatteringDevice, dtype: str, appended: int, options: dict[str, Any]) -> None:
    bench = Bench(device)
    cases = [stored(replace(PLAN, dtype=dtype, **options).case(n), dtype) for n in range(3)]
    bench.check(cases, [bench.request(case, dtype, appended) for case in cases])
    assert len(device.scattered) == 1
    assert not device.looks, "what says whether results have a meaning comes with them"


@HALF
def test_others_in_a_batch_are_computed_in_another_way(device: ScatteringDevice, dtype: str) -> None:
    bench = Bench(device)
    plans = [replace(PLAN, dtype=dtype, **options) for options in [*OPTIONS.values(), *OTHERS.values()]]
    cases = [stored(plan.case(n), dtype) for n, plan in enumerate(plans)]
    order = np.random.default_rng(0).permutation(len(cases)).tolist()
    kernels = bench.check([cases[n] for n in order], [bench.request(cases[n], dtype, 1) for n in order])
    assert sum(kernels.values()) > 0
    assert device.scattered


@HALF
@pytest.mark.parametrize("layout", [None, "length_first"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_is_computed_again(
    device: ScatteringDevice, dtype: str, layout: str | None, poison: float
) -> None:
    """In one sequence of a request; those beside it keep their results."""
    bench = Bench(device)
    cases = [stored(replace(PLAN, dtype=dtype, layout=layout, sinks=True).case(n), dtype) for n in range(3)]
    at = (1, 40, 0) if layout else (1, 0, 40)
    cases[1].value[at][3] = poison
    cases[1].__dict__.pop("expected", None)
    requests = [bench.request(case, dtype, 1) for case in cases]
    bench.check(cases, requests)
    first, again = device.scattered
    assert len(again.kv_lengths) * 9 == len(first.kv_lengths)
    assert device.looks == 1


@HALF
@pytest.mark.parametrize("where", [META, CUDA], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_on_a_device_that_the_host_cannot_read(
    monkeypatch: pytest.MonkeyPatch, dtype: str, where: torch.device, options: dict[str, Any]
) -> None:
    """By the kernels as torch declares them; all is waited for once."""
    with hollow(where):
        device = hollow_device(where, monkeypatch)
        bench = Bench(device, where)
        cases = [replace(PLAN, dtype=dtype, **options).case(n) for n in range(3)]
        requests = [bench.request(case, dtype, 1) for case in cases]
        for request in requests:
            request.enter()
            request.begin()
        with NothingWaits(where):
            batch = run_batch(bench.host.pages, device, requests)
    assert batch.kernel_calls == {varlen_cuda.NAME: 1}
    for request, found in zip(requests, batch.results, strict=True):
        assert len(found.output) + len(found.lse or b"") == request.extent.reply_bytes
    transfers = device._transfers
    assert isinstance(transfers, MetaTransfers)
    assert transfers.waits == 1


@pytest.mark.parametrize(("appended", "most"), [(0, 21), (1, 25)])
def test_the_operations_of_a_step_do_not_grow_with_its_caches(
    monkeypatch: pytest.MonkeyPatch, appended: int, most: int
) -> None:
    """In one request or in many: each takes some microseconds to launch."""
    counts = []
    for requests, caches in ((1, 3), (1, 9), (5, 3)):
        device = hollow_device(META, monkeypatch)
        bench = Bench(device, META)
        plan = replace(PLAN, dtype="bfloat16", batch=caches)
        batch = [bench.begun(plan.case(n), appended) for n in range(requests)]
        with Operations() as operations:
            finish = launch_batch(bench.host.pages, device, batch)
            assert finish is not None
            finish()
        counts.append(operations.count)
    assert len(set(counts)) == 1
    assert counts[0] <= most


@HALF
def test_what_was_launched_and_failed_is_computed(
    device: ScatteringDevice, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Its appends are written once more."""
    bench = Bench(device)
    cases = [stored(replace(PLAN, dtype=dtype).case(n), dtype) for n in range(3)]
    requests = [bench.request(case, dtype, 1) for case in cases]
    run_batch = run_module.run_batch

    def failing(tensors: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def launched_first(pool: PagePool, device: Any, batch: Any) -> BatchResult:
        with monkeypatch.context() as patch:
            patch.setattr(device, "fetching", failing)
            with pytest.raises(torch.OutOfMemoryError):
                launch_batch(pool, device, batch)
        return run_batch(pool, device, batch)

    monkeypatch.setitem(globals(), "run_batch", launched_first)
    bench.check(cases, requests)
    assert len(device.scattered) == 2


@pytest.mark.parametrize("appended", [2, 5])
def test_what_takes_many_operations_is_not_launched(monkeypatch: pytest.MonkeyPatch, appended: int) -> None:
    """Others would wait for it, whatever its bytes: more than one token for each cache; many caches, pages or calls."""
    device = hollow_device(META, monkeypatch)
    bench = Bench(device, META)
    cases = [replace(PLAN, dtype="bfloat16").case(n) for n in range(2)]
    transfers: Any = device._transfers
    assert launch_batch(bench.host.pages, device, [bench.begun(case, appended) for case in cases]) is None
    for bound in ("FEW_CACHES", "PLANNED_PAGES"):
        with monkeypatch.context() as patch:
            patch.setattr(run_module, bound, 5)
            assert launch_batch(bench.host.pages, device, [bench.begun(case, 1) for case in cases]) is None
    unlike = [replace(PLAN, dtype="bfloat16", scale=0.1 + n).case(n) for n in range(run_module.FEW_CALLS + 1)]
    assert launch_batch(bench.host.pages, device, [bench.begun(case, 1) for case in unlike]) is None
    assert not transfers.uploaded
    assert launch_batch(bench.host.pages, device, [bench.begun(cases[0], 1)]) is not None


@pytest.mark.parametrize("options", [*OPTIONS.values(), *OTHERS.values()], ids=[*OPTIONS, *OTHERS])
def test_what_is_launched_is_waited_for_elsewhere(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Launching waits for nothing; what cannot be launched so is left as it was."""
    device = hollow_device(META, monkeypatch)
    bench = Bench(device, META)
    requests = [bench.request(replace(PLAN, dtype="bfloat16", **options).case(n), "bfloat16", 1) for n in range(3)]
    for request in requests:
        request.enter()
        request.begin()
    transfers: Any = device._transfers
    finish = launch_batch(bench.host.pages, device, requests)
    assert transfers.waits == 0
    if options in OTHERS.values():
        assert finish is None
        assert not transfers.uploaded
        return
    assert finish is not None
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(finish).result()
    assert transfers.waits == 1
    assert batch.kernel_calls == {varlen_cuda.NAME: 1}
    assert [len(found.output) + len(found.lse or b"") for found in batch.results] == [
        r.extent.reply_bytes for r in requests
    ]
