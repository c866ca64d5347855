"""The memory that a server allocates for its caches at startup."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnserve_server.caches import opening
from attnserve_server.caches.opening import DEFAULT_CACHE_BYTES, open_caches
from attnserve_server.devices import open_device
from attnserve_server.host import control_groups
from attnserve_server.settings.config import Config
from attnserve_server.start_errors import ConfigError, StartError

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 2 GiB, all of which the process may use."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(control_groups, "memory_limit", lambda: None)
    monkeypatch.setattr(opening, "resident_bytes", lambda: 0)


def pool_bytes(config: Config) -> int:
    return open_caches(config, open_device("cpu", 1, 0, "auto")).store.pool_bytes


@pytest.mark.parametrize("size", [2 * GIB + 4096, 4000 << 40, 1 << 60])
def test_a_pool_beyond_the_machine_is_refused(size: int) -> None:
    """The allocation would succeed, and the process be killed when it writes to it."""
    with pytest.raises(StartError, match=r"^cache_bytes: .* is not available: there is 2GiB$"):
        pool_bytes(Config(cache_bytes=size, cache_page_bytes=4096))


def test_a_pool_beyond_the_control_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with what the process holds already."""
    monkeypatch.setattr(opening, "resident_bytes", lambda: 300 << 20)
    monkeypatch.setattr(control_groups, "memory_limit", lambda: GIB + (300 << 20) + 1000)
    with pytest.raises(StartError, match=r"^cache_bytes: 1025MiB .* is not available: there is 1GiB$"):
        pool_bytes(Config(cache_bytes=GIB + (1 << 20)))
    assert pool_bytes(Config(cache_bytes=GIB)) == GIB
    monkeypatch.setattr(control_groups, "memory_limit", lambda: 200 << 20)
    with pytest.raises(StartError, match=r"there is 0$"):
        pool_bytes(Config(cache_bytes=1 << 20))


@pytest.mark.parametrize(("max_bytes", "warns"), [(GIB, False), (GIB + 1, True)])
def test_less_memory_than_requests_may_take_is_worth_a_warning(
    caplog: pytest.LogCaptureFixture, max_bytes: int, warns: bool
) -> None:
    pool_bytes(Config(cache_bytes=GIB, max_bytes=max_bytes, max_message_bytes=1 << 20))
    assert ["beside caches of 1GiB there is 1GiB" in line for line in caplog.messages] == [True] * warns


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, DEFAULT_CACHE_BYTES), (GIB, GIB // 4), (9 * GIB, DEFAULT_CACHE_BYTES)]
)
def test_the_default_is_a_quarter_of_the_memory_at_most(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, expected: int
) -> None:
    monkeypatch.setattr(control_groups, "memory_limit", lambda: limit)
    assert pool_bytes(Config()) == expected


def test_the_default_is_half_of_what_is_left_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "memory_limit", lambda: 300 << 20)
    monkeypatch.setattr(opening, "resident_bytes", lambda: 260 << 20)
    assert pool_bytes(Config()) == 20 << 20


def test_the_default_holds_one_page_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "memory_limit", lambda: GIB)
    with pytest.raises(ConfigError, match=r"^cache_page_bytes: .* by default 256MiB here, found '300MiB'$"):
        pool_bytes(Config(cache_page_bytes=300 << 20))


class Gpu(SimpleNamespace):
    """A device with memory of its own, of which 6 GiB are free."""

    name = "cuda:0"
    torch_device = torch.device("meta")
    native = None

    def memory(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": GIB, "free": 6 * GIB}


def test_the_default_on_a_gpu_is_half_of_what_is_free_there() -> None:
    """Whatever memory the machine itself has."""
    device: Any = Gpu()
    assert open_caches(Config(), device).store.pool_bytes == 3 * GIB
    assert open_caches(Config(cache_bytes=5 * GIB), device).store.pool_bytes == 5 * GIB


@pytest.mark.parametrize(
    ("pool", "page", "expected"),
    [
        (0, 0, (512 << 10, 2 << 20)),
        (1 << 20, 0, (512 << 10, 1 << 20)),
        (5000, 0, (4992, 4992)),
        (0, 4096, (4096, 4096)),
    ],
)
def test_pages_are_larger_on_a_gpu(pool: int, page: int, expected: tuple[int, int]) -> None:
    """Unless the pool is smaller."""
    for device, size in zip((open_device("cpu", 1, 0, "auto"), Gpu()), expected, strict=True):
        host = open_caches(Config(cache_bytes=pool, cache_page_bytes=page), device)  # type: ignore[arg-type]
        assert host.store.page_bytes == size


def test_a_pool_beyond_the_memory_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    device: Any = Gpu()
    with pytest.raises(StartError, match=r"^cache_bytes: 7GiB of memory is not available on cuda:0$"):
        open_caches(Config(cache_bytes=7 * GIB), device)
