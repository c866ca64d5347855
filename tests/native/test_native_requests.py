"""Requests by the native kernel in a device: many sequences, the memory of replies, threads that cannot be started."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread
from threading import enumerate as enumerate_threads
from typing import Any

import messages
import numpy as np
import pytest
from limits import LIMITS

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import HELPED_FLOPS, CpuDevice
from attnserve_server.native import library, requests
from attnserve_server.native.payloads import broadcast_strides
from attnserve_server.requests.request import Request
from attnserve_server.requests.scores import MAX_FACTOR

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(2, 0, library.best("auto"))
    yield device
    device.close()


def request(seed: int, batch: int, **options: Any) -> Request:
    data = messages.random_attend(seed, 3, batch=batch, return_lse=True, **options).SerializeToString()
    return messages.read_request(data, limits=replace(LIMITS, max_sequences=2 * requests.MOST_SEQUENCES))


def test_each_of_many_sequences_has_the_bits_that_it_has_alone(device: CpuDevice) -> None:
    rng = np.random.default_rng(0)
    batch, heads, length = 70, 2, 3
    mask = rng.random((batch, 1, length, length)) < 0.7
    bias = rng.standard_normal((batch, heads, 1, length)).astype(np.float32)
    message = messages.random_attend(1, length, batch=batch, mask=mask, bias=bias, return_lse=True)
    together = device.run([messages.read(message)])
    assert together.kernel_calls == {library.NAME: 1}
    query, key, value = (messages.array(tensor) for tensor in (message.query, message.key, message.value))
    found = [np.frombuffer(part, np.float32) for part in (together.results[0].output, together.results[0].lse or b"")]
    output, lse = found[0].reshape(batch, -1), found[1].reshape(batch, -1)
    for n in range(batch):
        one = slice(n, n + 1)
        own = messages.attend(query[one], key[one], value[one], mask=mask[one], bias=bias[one], return_lse=True)
        (alone,) = device.run([messages.read(own)]).results
        assert bytes(alone.output) == output[n].tobytes()
        assert bytes(alone.lse or b"") == lse[n].tobytes()


@pytest.mark.parametrize("layout", ["heads_first", "length_first", "packed"])
@pytest.mark.parametrize("lengths", [None, (5, 2, 5, 5, 1, 5, 3)])
def test_a_sequence_that_is_not_finite_is_computed_anew_and_no_other(
    device: CpuDevice, layout: str, lengths: tuple[int, ...] | None
) -> None:
    """The others have the same bits as when all are finite, and it has the same bits as when alone."""
    rng, batch, heads, width, length = np.random.default_rng(5), 7, 2, 8, 5
    each = lengths or (length,) * batch
    query, key, value = (rng.standard_normal((batch, heads, length, width)).astype(np.float32) for _ in range(3))
    spoiled = value.copy()
    for n in (2, 3, 6):
        spoiled[n, 1, 0, 3] = np.nan

    def ask(value: Any, n: int | None = None) -> Any:
        chosen = list(range(batch)) if n is None else [n]
        options: dict[str, Any] = {"return_lse": True}
        if layout == "packed":
            ends: Any = np.array([each[m] for m in chosen], np.int64)
            tensors = [np.concatenate([t[m, :, : each[m]].swapaxes(0, 1) for m in chosen]) for t in (query, key, value)]
            options |= {"query_lengths": ends, "kv_lengths": ends, "layout": pb.LAYOUT_PACKED}
        else:
            tensors = [part[chosen] for part in (query, key, value)]
            if lengths is not None:
                options["kv_lengths"] = np.array([each[m] for m in chosen], np.int64)
            if layout == "length_first":
                tensors = [part.swapaxes(1, 2) for part in tensors]
                options["layout"] = pb.LAYOUT_LENGTH_FIRST
        found = device.run([messages.read(messages.attend(*tensors, **options))])
        calls = Counter(found.kernel_calls)
        if found.again:
            found = device.run([found.again[0]])  # type: ignore[list-item]  # it is a request
            calls.update(found.kernel_calls)
        (result,) = found.results
        parts = [np.frombuffer(part, np.float32) for part in (result.output, result.lse or b"")]
        if layout == "packed":
            edges = np.cumsum([each[m] for m in chosen])[:-1]
            outputs = np.split(parts[0].reshape(-1, heads, width), edges)
            lses = np.split(parts[1].reshape(heads, -1), edges, axis=1)
        else:
            outputs, lses = (list(part.reshape(len(chosen), -1)) for part in parts)
        return calls, [(output.tobytes(), lse.tobytes()) for output, lse in zip(outputs, lses, strict=True)]

    calls, mended = ask(spoiled)
    assert calls[library.NAME] == 1
    assert sum(calls.values()) > 1, "and others for what is not finite"
    _, finite = ask(value)
    for n in range(batch):
        expected = ask(spoiled, n)[1][0] if n in (2, 3, 6) else finite[n]
        assert mended[n] == expected, n
        assert np.isnan(np.frombuffer(mended[n][0], np.float32)).any() == (n in (2, 3, 6))


def test_more_sequences_than_calls_are_made_of_are_left_to_other_kernels(device: CpuDevice) -> None:
    """A call takes more memory than a sequence with one query and one key."""
    for batch, native in ((requests.MOST_SEQUENCES, True), (requests.MOST_SEQUENCES + 1, False), (0, False)):
        found = device.run([request(2, batch, width=1, heads=1)])
        assert (found.kernel_calls[library.NAME] > 0) == native


def test_a_reply_holds_no_memory_of_others(device: CpuDevice) -> None:
    """A caller that is slow to read a small reply must not keep another caller's large reply in memory."""
    small, large = device.run([request(3, 1), request(4, 2000)]).results
    held = small.output.obj
    assert isinstance(held, np.ndarray)
    assert held.nbytes < 2000
    assert large.output.nbytes > 100_000


def test_where_no_thread_is_to_be_had_the_caller_computes_alone(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    asked = messages.read(messages.random_attend(5, 300, heads=4, width=64))
    assert asked.extent.flops > 2 * HELPED_FLOPS
    (expected,) = device.run([asked]).results
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", start)
        lonely = CpuDevice(2, 0, library.best("auto"))
    (found,) = lonely.run([asked]).results
    lonely.close()
    assert bytes(found.output) == bytes(expected.output)


def is_native(device: CpuDevice, **options: Any) -> bool:
    """Whether the native kernel computes a request with these options."""
    kernel_calls = device.run([messages.read(messages.random_attend(0, **options))]).kernel_calls
    return bool(kernel_calls.get(library.NAME))


@pytest.mark.parametrize("hiding", [{}, {"mask": np.ones((3, 3), bool)}, {"bias": np.zeros((3, 3), np.float32)}])
def test_alibi_of_what_may_hide_keys_is_for_others(device: CpuDevice, hiding: dict[str, Any]) -> None:
    """The keys that are left may be so distant that their biases cost float32 its precision."""
    assert is_native(device, alibi_slopes=np.ones(2, np.float32), **hiding) == (not hiding)


@pytest.mark.parametrize(("name", "sign"), [("scale", 1.0), ("scale", -1.0), ("softcap", 1.0)])
def test_factors_that_take_scores_beyond_float32_are_for_others(device: CpuDevice, name: str, sign: float) -> None:
    assert is_native(device, **{name: sign * MAX_FACTOR})
    assert not is_native(device, **{name: sign * MAX_FACTOR * 1.001})


@pytest.mark.parametrize("wide", ["keys", "values"])
def test_heads_that_are_too_wide_are_for_others(device: CpuDevice, wide: str) -> None:
    for width, native in ((library.MAX_WIDTH, True), (library.MAX_WIDTH + 1, False)):
        keys, values = (np.ones((1, 1, 2, width if name == wide else 8), np.float32) for name in ("keys", "values"))
        kernel_calls = device.run([messages.read(messages.attend(keys, keys, values))]).kernel_calls
        assert bool(kernel_calls[library.NAME]) == native


def test_a_bias_of_minus_infinity_excludes_in_float64_too(device: CpuDevice) -> None:
    """What is finite stays finite in float32; what is not stays as it is."""
    asked = messages.random_attend(0, bias=np.full((3, 3), -np.inf), return_lse=True)
    (result,) = device.run([messages.read(asked)]).results
    assert not np.frombuffer(result.output, np.float32).any()
    assert (np.frombuffer(result.lse or b"", np.float32) == -np.inf).all()


def test_a_bias_that_only_float64_holds_excludes_nothing(device: CpuDevice) -> None:
    """It becomes the lowest of float32, which is finite: all keys of a row are as likely."""
    asked = [messages.random_attend(0, bias=np.full((3, 3), low)) for low in (-1e300, float(np.finfo(np.float32).min))]
    beyond, lowest = device.run([messages.read(each) for each in asked]).results
    assert bytes(beyond.output) == bytes(lowest.output)
    assert np.frombuffer(beyond.output, np.float32).any()


@pytest.mark.parametrize("shape", [*itertools.product((1, 2), repeat=4), (1, 2), (2, 1), (2,)], ids=str)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_what_is_broadcast_is_what_it_is_written_out(device: CpuDevice, name: str, shape: tuple[int, ...]) -> None:
    drawn = np.random.default_rng(len(shape)).standard_normal(shape)
    given = drawn < 0.5 if name == "mask" else drawn.astype(np.float32)
    view = np.broadcast_to(given, (2, 2, 2, 2))
    whole = np.ascontiguousarray(view)
    asked = [messages.read(messages.random_attend(0, 2, batch=2, **{name: each})) for each in (given, whole)]
    assert broadcast_strides(asked[0].problem, name) == tuple(step // given.itemsize for step in view.strides)
    results = device.run(asked).results
    assert bytes(results[0].output) == bytes(results[1].output)


def test_sequences_of_different_lengths_have_a_mask_and_a_bias_each(device: CpuDevice) -> None:
    rng, batch = np.random.default_rng(1), 4
    lengths = np.array([3, 1, 2, 3], np.int64)
    options: dict[str, Any] = {
        "mask": rng.random((batch, 1, 3, 3)) < 0.7,
        "bias": rng.standard_normal((batch, 2, 1, 3)).astype(np.float32),
        "kv_lengths": lengths,
    }
    message = messages.random_attend(1, 3, batch=batch, **options)
    tensors = [messages.array(tensor) for tensor in (message.query, message.key, message.value)]
    (together,) = device.run([messages.read(message)]).results
    for n, output in enumerate(np.frombuffer(together.output, np.float32).reshape(batch, -1)):
        own = {name: each[n : n + 1] for name, each in options.items()}
        (alone,) = device.run([messages.read(messages.attend(*(each[n : n + 1] for each in tensors), **own))]).results
        assert bytes(alone.output) == output.tobytes()


def test_packed_sequences_without_their_lse(device: CpuDevice) -> None:
    tensors = np.random.default_rng(2).standard_normal((3, 5, 2, 8)).astype(np.float32)
    ends = np.array([2, 3], np.int64)
    options: dict[str, Any] = {"query_lengths": ends, "kv_lengths": ends, "layout": pb.LAYOUT_PACKED}
    asked = [messages.attend(*tensors, **options, return_lse=return_lse) for return_lse in (False, True)]
    without, within = device.run([messages.read(each) for each in asked]).results
    assert without.lse is None
    assert bytes(without.output) == bytes(within.output)


class Watched(library.Library):
    """A kernel that records the threads given to it."""

    def __init__(self) -> None:
        super().__init__(library.available()[0])
        self.seen: list[library.Threads | None] = []

    def attend(self, calls: bytearray, threads: library.Threads | None = None) -> list[int]:
        self.seen.append(threads)
        return super().attend(calls, threads)


@pytest.mark.parametrize(("kv_length", "helpers"), [(256, None), (1200, 0), (2048, 1), (8192, 1)])
def test_a_query_is_helped_to_read_what_takes_a_while(kv_length: int, helpers: int | None) -> None:
    """8 heads of 64 in float32 are 4 KiB a token, and 256 FLOPs for each 512 bytes."""
    kernel = Watched()
    device = CpuDevice(2, 0, kernel)
    device.run([messages.read(messages.random_attend(6, 1, kv_length=kv_length, heads=8, width=64))])
    device.close()
    (threads,) = kernel.seen
    assert (None if threads is None else threads.helpers) == helpers


def test_who_finds_the_team_at_work_computes_alone(device: CpuDevice) -> None:
    """Concurrent callers share one team, which helps only one of them at a time."""
    asked = [messages.read(messages.random_attend(seed, 200, heads=4, width=64)) for seed in range(4)]
    expected = [bytes(device.run([request]).results[0].output) for request in asked]

    def run(place: int) -> bytes:
        return bytes(device.run([asked[place]]).results[0].output)

    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(run, [*range(4)] * 25))
    assert found == expected * 25


def test_a_team_ends_with_its_device() -> None:
    before = set(enumerate_threads())
    device = CpuDevice(4, 0, library.best("auto"))
    helpers = set(enumerate_threads()) - before
    assert len(helpers) == 3
    device.close()
    assert not any(thread.is_alive() for thread in helpers)
    device.close()
