"""What tests of the admission do to one: fill it, have requests refused, and tell it how fast requests are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import OpenAdmission
from waiting import work

from attnserve_server.errors import Overloaded

ME, OTHER = "me", "another"


def counts(admission: OpenAdmission) -> tuple[int, int, int]:
    return admission.requests, admission.bytes, admission.flops


def refused(admission: OpenAdmission, size: int, flops: int, caller: str = ME) -> Overloaded:
    """The error of a refused request; refusing it must not have counted anything."""
    before = counts(admission)
    with pytest.raises(Overloaded) as caught:
        admission.admit(caller, size, flops)
    assert counts(admission) == before
    return caught.value


def compute(flops: int, seconds: float) -> Callable[[OpenAdmission], None]:
    def measure(admission: OpenAdmission) -> None:
        admission.pace.learn(work(1, flops), seconds)

    return measure


def at(flops: int, seconds: float) -> Callable[[OpenAdmission], None]:
    """Measurements that say that so many FLOPs take so many seconds."""

    def measure(admission: OpenAdmission) -> None:
        for _ in range(200):
            compute(flops, seconds)(admission)

    return measure


def queue_of(count: int, seconds: float, max_queue_time: float, caller: str = ME) -> OpenAdmission:
    """An admission with `count` requests in flight that take `seconds` each."""
    admission = OpenAdmission(10**6, 10**9, 10**18, max_queue_time=max_queue_time)
    at(10**9, seconds)(admission)
    for _ in range(count):
        admission.admit(caller, 1, 10**9)
    return admission


def flood(admission: OpenAdmission, caller: str, size: int, flops: int) -> Overloaded:
    """Sends requests of one caller until one is refused; returns the error."""
    while True:
        try:
            admission.admit(caller, size, flops)
        except Overloaded as error:
            return error
