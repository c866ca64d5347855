"""Which requests have a layout, which is what the library can do; and how many plans are kept for all others."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import pytest
from stepping import Stepping, device, step

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.caches.request import CachedRequest
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library, requests
from attnserve_server.native import messages as native_messages
from attnserve_server.native.layouts import MOST_RESULT_BYTES, MOST_SEQUENCES, layout_of
from attnserve_server.native.messages import Messages
from attnserve_server.native.requests import NativeRequests

__all__ = ["device"]  # a fixture
pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


def has_layout(length: int = 1, **options: Any) -> bool:
    return layout_of(messages.read(messages.random_attend(0, length, **options))) is not None


def test_a_layout_has_as_many_sequences_as_the_library_has_room_for() -> None:
    assert [has_layout(batch=batch) for batch in (0, 1, MOST_SEQUENCES, MOST_SEQUENCES + 1)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_layout_has_results_that_the_library_has_room_for() -> None:
    queries = MOST_RESULT_BYTES // (4 * 64)
    asked = {"kv_length": 1, "heads": 1, "width": 64}
    assert [has_layout(length, **asked) for length in (0, queries, queries + 1)] == [False, True, False]


def test_references_to_caches_that_are_apart_are_not_learnt(device: CpuDevice) -> None:
    """Protobuf lets other fields lie between them."""
    assert device.native is not None
    caches = Stepping(device, Messages(device.native.library, lambda effort: None))
    request = step(caches.create(3), caches.create(4))
    last = pb.AttendRequest(caches=request.caches[1:])
    del request.caches[1:]
    for message, together in (
        (last.SerializeToString() + request.SerializeToString(), True),
        (request.SerializeToString() + last.SerializeToString(), False),
    ):
        read = caches.read(message)
        assert isinstance(read, CachedRequest)
        layout = caches.fast_path.layout_of(read)
        assert layout is not None
        assert caches.messages.learn(message, layout, read.payloads, 0, len(message)) == together
        assert caches.messages.knows(message) == together


def test_a_library_of_another_version_reads_no_messages(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.native is not None
    monkeypatch.setattr(native_messages, "_ASKED_WORDS", native_messages._ASKED_WORDS + 1)
    with pytest.raises(OSError, match="another version"):
        Messages(device.native.library, lambda effort: None)


@pytest.fixture
def native() -> NativeRequests:
    kernel = library.best("auto")
    assert kernel is not None
    return NativeRequests(kernel)


def output(native: NativeRequests, **options: Any) -> bytes:
    (result,), broken = native.run([messages.read(messages.random_attend(0, 3, batch=2, **options))], None)
    assert result is not None
    assert not broken
    return bytes(result.output)


def test_sequences_of_other_lengths_than_before_have_a_plan_of_their_own(native: NativeRequests) -> None:
    """Equal headers have one problem; the lengths are no part of it."""
    lengths = [np.array(each, np.int64) for each in ((3, 3), (1, 2), (2, 2), (3, 3))]
    together = [output(native, kv_lengths=each) for each in lengths]
    assert together == [output(NativeRequests(native._library), kv_lengths=each) for each in lengths]
    assert len(set(together)) == 3


def test_plans_are_forgotten_when_they_are_too_many(native: NativeRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_KEPT", 3)
    found = []
    for width in range(1, 9):
        output(native, width=width)
        found.append(len(native._plans))
    assert found == [1, 2, 3, 1, 2, 3, 1, 2]


def test_what_the_kernel_does_not_compute_keeps_it_from_no_other(native: NativeRequests) -> None:
    asked = [messages.random_attend(0, return_scores=scores) for scores in (pb.SCORE_STAGE_RAW, None)]
    results, _ = native.run([messages.read(each) for each in asked], None)
    assert [result is None for result in results] == [True, False]
