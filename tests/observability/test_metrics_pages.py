"""Pages of metrics: how many are rendered, whoever asks, and that each shows what was when it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector
from rpcs import new_metrics

from attnserve_server.observability import pages
from attnserve_server.observability.pages import Pages

CLOSE_S = 0.2
"""So often a page is rendered in these tests, where one is saved up."""


class Readings(Collector):
    """How often the metrics have been read."""

    def __init__(self) -> None:
        self.count = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.count += 1
        yield GaugeMetricFamily("readings", "Readings.", value=self.count)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    monkeypatch.setattr(pages, "SAVED", 1)
    monkeypatch.setattr(pages, "EVERY_S", CLOSE_S)
    return Readings()


async def test_all_who_ask_meanwhile_get_the_next_page(readings: Readings) -> None:
    """And it is rendered after they have asked, so that nobody sees what was before."""
    served, begin = Pages(readings.registry), monotonic()
    for turn in range(1, 4):
        got = await asyncio.gather(*(served.page("text/plain", generate_latest) for _ in range(100)))
        assert readings.count == turn
        assert set(got) == {f"# HELP readings Readings.\n# TYPE readings gauge\nreadings {turn}.0\n".encode()}
        assert monotonic() - begin >= (turn - 1) * CLOSE_S * 0.9


async def test_pages_are_saved_up_and_no_more_than_that(readings: Readings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SAVED", 5)
    monkeypatch.setattr(pages, "EVERY_S", 1e6)
    served = Pages(readings.registry)
    for _ in range(5):
        await served.page("text/plain", generate_latest)
    waits = asyncio.create_task(served.page("text/plain", generate_latest))
    done, _ = await asyncio.wait([waits], timeout=0.1)
    assert not done
    assert readings.count == 5
    waits.cancel()
    served.close()


async def test_one_who_goes_takes_no_page_from_another(readings: Readings) -> None:
    served = Pages(readings.registry)
    await served.page("text/plain", generate_latest)
    goes, stays = (asyncio.create_task(served.page("text/plain", generate_latest)) for _ in range(2))
    await asyncio.sleep(0)
    goes.cancel()
    assert await asyncio.wait_for(stays, 60) is not None
    assert goes.cancelled()


async def test_formats_are_few_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what its own request would have."""
    monkeypatch.setattr(pages, "SAVED", 1)
    monkeypatch.setattr(pages, "EVERY_S", 1e-3)
    registry = new_metrics().registry
    rendered: list[bytes] = []
    served = Pages(registry)
    escapings = [f";escaping={each}" for each in ("underscores", "allow-utf-8", "dots", "values", "odd")]
    kinds = [
        f"{kind};version={version}"
        for kind, versions in (
            ("text/plain", "0.0.4 1.0.0 2.1"),
            ("application/openmetrics-text", "0.0.1 1.0.0 1.2 2.0.0"),
        )
        for version in versions.split()
    ]
    chosen = [choose_encoder(kind + escaping) for kind in kinds for escaping in ["", *escapings]]

    def noting(encode: pages.Encode) -> pages.Encode:
        def note(registry: CollectorRegistry) -> bytes:
            rendered.append(encode(registry))
            return rendered[-1]

        return note

    got = await asyncio.gather(*(served.page(content_type, noting(encode)) for encode, content_type in chosen))
    assert len(rendered) == 6
    for (encode, _), page in zip(chosen, got, strict=True):
        assert page is not None
        assert lasting(page) == lasting(encode(registry))


def lasting(page: bytes) -> list[str]:
    """The lines of a page that another has, too: not those about the process, which change."""
    return [line for line in page.decode().splitlines() if "process_" not in line]
