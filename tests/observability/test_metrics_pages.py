"""Pages of metrics: how many are rendered, whoever asks, and that each shows what was when it was asked for."""

from __future__ import annotations

import asyncio
import itertools
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
    registry, readings = new_metrics().registry, Readings()
    registry.register(readings)
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
    got = await asyncio.gather(*(served.page(content_type, encode) for encode, content_type in chosen))
    assert readings.count == len({pages.Format.of(content_type) for _, content_type in chosen}) <= 6
    for (encode, _), page in zip(chosen, got, strict=True):
        assert page is not None
        assert lasting(page) == lasting(encode(registry))


def lasting(page: bytes) -> list[str]:
    """The lines of a page that another has, too: not those about the process, which change."""
    changing = tuple(f"{escaped}{name}" for name in ("process_", "readings ") for escaped in ("", "U__"))
    return [line for line in page.decode().splitlines() if not line.startswith(changing)]


class Large(Collector):
    """Metrics with one sample, with many, and with none."""

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for count in (1, 2 * pages.PIECE + 1, 0, pages.PIECE):
            metric = GaugeMetricFamily(f"with_{count}", f"There are {count}.", labels=["number"])
            for number in range(count):
                metric.add_metric([str(number)], number)
            yield metric


PIECES = 1 + 3 + 1 + 1
"""How many pieces `Large` is encoded in."""


@pytest.mark.parametrize("accepted", ["text/plain", "application/openmetrics-text;version=1.0.0"])
@pytest.mark.parametrize(
    ("slice_seconds", "patience", "pauses"),
    [(1.0, 1e6, PIECES), (1.1, 1e6, PIECES // 2), (3.0, 1e6, PIECES // 3), (7.0, 1e6, 0), (1.0, 3.5, 2)],
)
async def test_while_a_page_is_rendered_the_loop_turns(
    monkeypatch: pytest.MonkeyPatch, accepted: str, slice_seconds: float, patience: float, pauses: int
) -> None:
    """After each slice, and no more than that, unless it takes too long: here, a piece takes a second. The page is what
    it would be in one.
    """
    monkeypatch.setattr(pages, "SLICE_SECONDS", slice_seconds)
    monkeypatch.setattr(pages, "PATIENCE_S", patience)
    monkeypatch.setattr(pages, "perf_counter", itertools.count(1000.0).__next__)
    registry = CollectorRegistry()
    registry.register(Large())
    encode, content_type = choose_encoder(accepted)
    turns = 0

    async def turning() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(turning())
    page = await Pages(registry).page(content_type, encode)
    other.cancel()
    assert page == encode(registry)
    around = 5  # until it begins, and from its end to here
    assert pauses * pages.TURNS <= turns <= pauses * pages.TURNS + around


class Broken(Collector):
    """Metrics that cannot be read."""

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("first", "Readable.", value=1)
        raise RuntimeError("the device does not say")


async def test_without_readings_there_is_no_page_but_there_may_be_a_later_one(
    readings: Readings, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    readings.registry.register(broken)
    served = Pages(readings.registry)
    assert await served.page("text/plain", generate_latest) is None
    assert "the metrics could not be read" in caplog.text
    readings.registry.unregister(broken)
    page = await served.page("text/plain", generate_latest)
    assert page is not None
    assert page.decode().endswith("\nreadings 2.0\n")


async def test_after_the_end_nothing_is_rendered(readings: Readings) -> None:
    """Neither what waits for its time nor the rest of what has begun."""
    served = Pages(readings.registry)
    asked = asyncio.create_task(served.page("text/plain", generate_latest))
    await asyncio.sleep(0)
    served.close()
    done, _ = await asyncio.wait([asked], timeout=2 * CLOSE_S)
    assert not done
    assert readings.count == 0
    asked.cancel()
