"""A clock in place of the event loop's: its time passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest


class Clock:
    """Stands in for the loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: dict[Any, tuple[float, Callable[[], object]]] = {}

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, do: Callable[[], object]) -> object:
        timer = object()
        self.timers[timer] = when, do
        return timer

    def call_later(self, delay: float, do: Callable[[], object]) -> object:
        return self.call_at(self.now + delay, do)

    def until(self, time: float) -> int:
        """Lets time pass; returns how many timers ran."""
        ran = 0
        while self.timers:
            timer, (when, do) = min(self.timers.items(), key=lambda item: item[1][0])
            if when > time:
                break
            del self.timers[timer]
            self.now = when
            do()
            ran += 1
        self.now = time
        return ran


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock
