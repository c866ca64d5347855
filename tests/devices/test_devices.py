"""Devices: a request's bits do not depend on its batch or on threads, and results have the promised size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import messages
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import opened_devices
from device_bench import assert_batch_invariant, assert_matches_oracle, contents, packed
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import kept_bytes

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices import DeviceError, open_device
from attnserve_server.devices.cpu import SPLIT_FLOPS, CpuDevice
from attnserve_server.devices.division import divided
from attnserve_server.kernels import KERNELS, AttentionCall, kernel_for
from attnserve_server.native import library

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


@pytest.fixture(scope="module", params=["native", "tensors"])
def devices(request: pytest.FixtureRequest) -> Iterator[dict[int, CpuDevice]]:
    """Devices that compute what they can with the native library, and devices without it."""
    yield from opened_devices(library.best("auto") if request.param == "native" else None)


@EVERY_DTYPE
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 3, 33])
def test_stacks_equal_single_runs(devices: dict[int, CpuDevice], dtype: Any, causal: bool, length: int) -> None:
    batch = [
        messages.random_attend(
            seed, length, kv_length=2 * length + 1, heads=4, kv_heads=2, dtype=dtype, causal=causal, return_lse=True
        )
        for seed in range(7)
    ]
    assert_batch_invariant(devices, [messages.read(message) for message in batch])


@EVERY_DTYPE
@pytest.mark.parametrize("lengths", [[350], [120] * 3, [118, 119, 120], list(range(110, 116))], ids=str)
def test_work_that_is_divided_equals_work_that_is_not(
    devices: dict[int, CpuDevice], dtype: Any, lengths: list[int]
) -> None:
    """Alone, all but the first are too small to be divided among threads; together they are not."""
    batch = [
        messages.read(messages.random_attend(seed, length, heads=4, kv_heads=2, width=64, dtype=dtype, return_lse=True))
        for seed, length in enumerate(lengths)
    ]
    assert sum(request.extent.flops for request in batch) > SPLIT_FLOPS
    assert len(batch) == 1 or max(request.extent.flops for request in batch) < SPLIT_FLOPS
    assert_batch_invariant(devices, batch)


def test_threads_that_are_new_compute_the_same_bits(devices: dict[int, CpuDevice]) -> None:
    """Torch's products are by one thread, from each one's first on: such sums depend on how many there are."""
    fields: dict[str, Any] = {"heads": 1, "width": 20, "dtype": np.float64, "return_scores": pb.SCORE_STAGE_RAW}
    batch = [messages.read(messages.random_attend(seed, 35, **fields)) for seed in range(240)]
    assert sum(request.extent.flops for request in batch) > SPLIT_FLOPS
    alone = [contents(devices[1].run([request]).results[0]) for request in batch]
    for _ in range(4):
        device = CpuDevice(2, 0, None)
        together = device.run(batch).results
        device.close()
        assert [contents(result) for result in together] == alone


def test_divided_work_is_right(devices: dict[int, CpuDevice]) -> None:
    message = messages.random_attend(0, 300, batch=2, heads=4, kv_heads=2, width=48, causal=True, return_lse=True)
    request = messages.read(message)
    assert request.extent.flops > SPLIT_FLOPS
    assert_matches_oracle(devices[2], message, causal=True)


@EVERY_DTYPE
@pytest.mark.parametrize("stage", [pb.SCORE_STAGE_UNSPECIFIED, pb.SCORE_STAGE_WEIGHTS])
def test_packed_requests_lengths_and_plain_ones_together(devices: dict[int, CpuDevice], dtype: Any, stage: int) -> None:
    common: dict[str, Any] = {"dtype": dtype, "causal": True, "return_lse": True, "return_scores": stage}
    shape: dict[str, Any] = {"batch": 3, "heads": 4, "kv_heads": 2}
    batch = [
        packed(0, [3, 0, 5], [4, 2, 5], **common),
        messages.random_attend(1, 4, kv_lengths=np.array([4, 0, 2]), **shape, **common),
        messages.random_attend(2, 4, **shape, **common),
        packed(3, [5], [5], **common),
        messages.random_attend(4, 4, **shape, **common),
        messages.random_attend(5, 4, kv_lengths=np.array([2, 2, 2]), **shape, **common),
        packed(6, [], [], **common),
    ]
    requests = [messages.read(message) for message in batch]
    assert len({request.problem.group for request in requests}) == 1
    assert_batch_invariant(devices, requests)


@EVERY_DTYPE
def test_requests_that_differ_in_their_lengths_alone(devices: dict[int, CpuDevice], dtype: Any) -> None:
    """Those that have the same lengths among them, too: of one length, which are one call, and of several."""
    batch = [
        messages.random_attend(
            seed, 4, kv_lengths=np.array(lengths), batch=3, heads=4, kv_heads=2, dtype=dtype, return_lse=True
        )
        for seed, lengths in enumerate([[4, 0, 2], [2, 2, 2], [4, 0, 2], [3, 3, 3], [2, 2, 2], [0, 4, 2]])
    ]
    requests = [messages.read(message) for message in batch]
    assert len({id(request.problem) for request in requests}) == 1
    assert_batch_invariant(devices, requests)


ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "one key": {"kv_length": 1},
    "length first": {"layout": pb.LAYOUT_LENGTH_FIRST},
    "masked": {"mask": np.tri(4, 4).astype(bool)},
    "written out": {"softcap": 2.0, "return_scores": pb.SCORE_STAGE_RAW},
    "large": {"width": 4096},
}


@pytest.mark.parametrize("kind", ALONE)
def test_results_stay_as_they_are_when_more_is_computed(devices: dict[int, CpuDevice], kind: str) -> None:
    """Memory for inputs may be reused for similar requests; memory of results may not."""
    one, other = (messages.read(messages.random_attend(seed, 4, heads=4, **ALONE[kind])) for seed in (0, 1))
    found = devices[1].run([one]).results[0]
    before = contents(found)
    assert contents(devices[1].run([other]).results[0]) != before
    assert contents(found) == before


def test_a_caller_slow_to_receive_a_reply_does_not_hold_those_of_others(devices: dict[int, CpuDevice]) -> None:
    """Although requests that are alike are computed as one."""
    batch = [messages.read(messages.random_attend(seed, 9, return_lse=True)) for seed in range(7)]
    for result in devices[1].run(batch).results:
        assert result.lse is not None
        assert kept_bytes(result.output) <= 2 * (len(result.output) + len(result.lse))
        assert kept_bytes(result.lse) <= 2 * (len(result.output) + len(result.lse))


def test_threads_that_compute_what_is_alike_do_not_mix_it_up(devices: dict[int, CpuDevice]) -> None:
    requests = [messages.read(messages.random_attend(seed, 24, heads=4, causal=True)) for seed in range(8)]
    alone = [contents(devices[1].run([request]).results[0]) for request in requests]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda request: contents(devices[1].run([request]).results[0]), requests * 50)
    assert list(found) == alone * 50


def test_requests_with_nan_and_infinities_among_finite_ones(devices: dict[int, CpuDevice]) -> None:
    batch = [messages.random_attend(seed, 5, heads=4, kv_heads=2, return_lse=True) for seed in range(6)]
    for place, value in ((1, np.nan), (3, np.inf), (4, -np.inf)):
        for name in ("query", "key", "value")[place % 3 :]:
            poisoned = messages.array(getattr(batch[place], name)).copy()
            poisoned[0, 1, 2, 3] = value
            getattr(batch[place], name).CopyFrom(messages.tensor(poisoned))
    requests = [messages.read(message) for message in batch]
    assert_batch_invariant(devices, requests)
    for place in (0, 2, 5):
        assert_matches_oracle(devices[1], batch[place])
    nan_rows = [np.isnan(np.frombuffer(result.output, np.float32)).any() for result in devices[1].run(requests).results]
    assert nan_rows == [False, True, False, True, True, False]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1), (2, 1, 4), (1, 3, 4), (2, 1, 1, 4), (2, 2, 3, 4)])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_stacked_masks_and_biases_of_every_broadcast(
    devices: dict[int, CpuDevice], name: str, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    batch = []
    for seed in range(4):
        given = rng.random(shape) < 0.6 if name == "mask" else rng.standard_normal(shape).astype(np.float32)
        fields: dict[str, Any] = {name: np.asarray(given)}
        batch.append(messages.random_attend(seed, 3, kv_length=4, batch=2, **fields))
    requests = [messages.read(message) for message in batch]
    assert_batch_invariant(devices, requests)
    for message in batch:
        assert_matches_oracle(devices[1], message, **{name: messages.array(getattr(message, name))})


@pytest.mark.parametrize("layout", [pb.LAYOUT_HEADS_FIRST, pb.LAYOUT_LENGTH_FIRST])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_stacks_in_every_layout_and_rank(devices: dict[int, CpuDevice], layout: int, rank: int) -> None:
    shape = {2: (5, 8), 3: (4, 5, 8), 4: (2, 4, 5, 8)}[rank]
    rng = np.random.default_rng(0)
    batch = [
        messages.attend(
            *(rng.standard_normal(shape).astype(np.float32) for _ in range(3)), layout=layout, return_lse=True
        )
        for _ in range(3)
    ]
    assert_batch_invariant(devices, [messages.read(message) for message in batch])
    name = "length_first" if layout == pb.LAYOUT_LENGTH_FIRST else "heads_first"
    for message in batch:
        assert_matches_oracle(devices[1], message, layout=name)


requests = st.builds(
    lambda seed, **fields: (seed, fields),
    st.integers(0, 99),
    length=st.integers(0, 4),
    kv_length=st.integers(1, 4),
    batch=st.integers(1, 3),
    priority=st.integers(-1, 1),
    lengths=st.booleans(),
)


@settings(max_examples=settings().max_examples // 2)
@given(
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    stage=st.sampled_from([pb.SCORE_STAGE_UNSPECIFIED, pb.SCORE_STAGE_RAW, pb.SCORE_STAGE_WEIGHTS]),
    softcap=st.sampled_from([0.0, 3.0]),
    sinks=st.booleans(),
    drawn=st.lists(requests, min_size=2, max_size=6),
)
def test_random_batches(
    devices: dict[int, CpuDevice],
    dtype: Any,
    causal: bool,
    stage: int,
    softcap: float,
    sinks: bool,
    drawn: list[tuple[int, dict[str, Any]]],
) -> None:
    batch = []
    for seed, given_fields in drawn:
        fields = dict(given_fields, dtype=dtype, causal=causal, return_scores=stage, softcap=softcap, return_lse=True)
        if fields.pop("lengths"):
            fields["kv_lengths"] = np.random.default_rng(seed).integers(0, fields["kv_length"] + 1, fields["batch"])
        if sinks:
            fields["sinks"] = np.random.default_rng(seed).standard_normal(2).astype(np.float32)
        batch.append(messages.read(messages.random_attend(seed, **fields)))
    assert_batch_invariant(devices, batch)


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_run_on_one_thread_each_whatever_torch_was_told(devices: dict[int, CpuDevice], threads: int) -> None:
    pool = devices[threads]._pool
    assert (pool is None) == (threads == 1)
    assert torch.get_num_threads() == 1
    if pool is not None:
        assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}


def test_what_a_device_says_of_itself(tensor_devices: dict[int, CpuDevice]) -> None:
    device = tensor_devices[2]
    device.warm_up()
    assert (device.name, device.threads, device.memory()) == ("cpu", 2, {})
    assert device.description
    names = [name for name, _ in device.kernels()]
    assert names == ["cpu_pages", "cpu_flash", "math"]
    batch = device.run([messages.read(messages.random_attend(seed)) for seed in range(2)])
    assert dict(batch.kernel_calls) == {"cpu_flash": 1}  # two requests, one call
    assert min(batch.staging, batch.compute, batch.fetch) > 0
    assert batch.padding == 0.0


def test_requests_are_counted_by_the_kernel_that_computed_them(devices: dict[int, CpuDevice]) -> None:
    scored = messages.random_attend(9, return_scores=pb.SCORE_STAGE_WEIGHTS)
    plain = [messages.read(messages.random_attend(seed)) for seed in range(3)]
    for device in devices.values():
        if device.native is None:
            pytest.skip("no native kernel is here")
        device.take_kernel_calls()
        assert device.run(plain).kernel_calls == Counter({library.NAME: 3})
        assert device.run([messages.read(scored)]).kernel_calls == Counter(math=1)
        assert device.run([*plain, messages.read(scored)]).kernel_calls == Counter({library.NAME: 3, "math": 1})
        assert not device.take_kernel_calls()


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "parts", "axis"),
    [(2, 2, 2, 0), (4, 2, 2, 0), (3, 2, 2, 1), (1, 2, 2, 1), (3, 1, 2, 0), (1, 1, 1, 0)],
)
def test_a_call_is_divided_by_sequences_or_by_heads_where_these_do_not_divide_evenly(
    sequences: int, kv_heads: int, parts: int, axis: int
) -> None:
    query, key = torch.randn(sequences, 4, 3, 8), torch.randn(sequences, kv_heads, 3, 8)
    call = AttentionCall(query, key, key, 0.125)
    assert kernel_for(call).heads_apart
    divided_into, along = divided(call, 2)
    assert (len(divided_into), along) == (parts, axis)
    assert torch.equal(torch.cat([part.query for part in divided_into], along), query)
    assert torch.equal(torch.cat([part.key for part in divided_into], along), key)


def test_every_kernel_for_requests_is_warm_before_they_come(
    tensor_devices: dict[int, CpuDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tensor_devices[2]
    device.take_kernel_calls()
    with monkeypatch.context() as patch:
        patch.setattr(device, "take_kernel_calls", Counter)  # so that the counts stay
        device.warm_up()
    assert set(device.take_kernel_calls()) == {kernel.name for kernel in KERNELS if kernel.device in ("cpu", "any")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device() -> None:
    with pytest.raises(DeviceError, match="'cuda:7' is not available"):
        open_device("cuda:7", 1, 0, "auto")


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch see a GPU that is too old."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")


@pytest.mark.usefixtures("turing")
def test_a_gpu_that_is_too_old_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"Tesla T4 has compute capability 7\.5, and kernels need 8\.0"):
        open_device("cuda", 1, 0, "auto")


@pytest.mark.usefixtures("turing")
def test_a_gpu_that_is_too_old_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    threads = torch.get_num_threads()
    device = open_device("auto", 1, 0, "off")
    device.close()
    torch.set_num_threads(threads)
    assert device.name == "cpu"
    assert "Tesla T4 has compute capability 7.5" in caplog.text


@pytest.mark.usefixtures("turing")
def test_a_gpu_that_is_new_enough_is_opened_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, index - 1))
    monkeypatch.setattr("attnserve_server.devices.cuda.CudaDevice", lambda index: index)
    opened: Any = open_device("cuda:1", 1, 0, "auto")
    assert opened == 1
    with pytest.raises(DeviceError, match="there are 2 CUDA devices"):
        open_device("cuda:2", 1, 0, "auto")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert [open_device(name, 1, 0, "auto") for name in ("auto", "cuda", "cuda:0")] == [0, 0, 0]
