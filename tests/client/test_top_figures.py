"""What `attnserve top` computes from two readings of the metrics, and how it shows that."""

from __future__ import annotations

import io
import math
import re
import urllib.request

import pytest
from conftest import Server
from rich.console import Console

from attnserve._commands.reading import Reading
from attnserve._commands.top_figures import Figures, Load, figures
from attnserve._commands.top_view import view

PAGE = """
# TYPE attnserve_build info
attnserve_build_info{{version="1.2.3",torch="2.13.0",device="cpu"}} 1
# TYPE attnserve_state gauge
attnserve_state{{state="serving"}} 1
attnserve_state{{state="draining"}} 0
# TYPE attnserve_requests counter
attnserve_requests_total{{operation="attend",code="OK"}} {ok}
attnserve_requests_total{{operation="attend",code="INTERNAL"}} {failed}
attnserve_requests_total{{operation="apply",code="OK"}} 0
# TYPE attnserve_request_duration_seconds histogram
attnserve_request_duration_seconds_bucket{{operation="attend",le="0.001"}} {ok}
attnserve_request_duration_seconds_bucket{{operation="attend",le="+Inf"}} {ok}
attnserve_request_duration_seconds_sum{{operation="attend"}} 1
attnserve_request_duration_seconds_count{{operation="attend"}} {ok}
# TYPE attnserve_device_busy_seconds counter
attnserve_device_busy_seconds_total {busy}
# TYPE attnserve_in_flight_requests gauge
attnserve_in_flight_requests 30
# TYPE attnserve_in_flight_bytes gauge
attnserve_in_flight_bytes 100
# TYPE attnserve_in_flight_limit gauge
attnserve_in_flight_limit{{bound="requests"}} 40
attnserve_in_flight_limit{{bound="bytes"}} 1000
# TYPE attnserve_caller_flops counter
attnserve_caller_flops_total{{caller="[bold]search"}} {flops}
attnserve_caller_flops_total{{caller="ranking"}} 0
"""


def reading(at: float, ok: int, failed: int = 0, busy: float = 0.0, flops: float = 0.0) -> Reading:
    """A metrics page as read at this moment."""
    return Reading(Reading.parse(PAGE.format(ok=ok, failed=failed, busy=busy, flops=flops)).samples, at)


def text(found: Figures, width: int = 80, history: tuple[float, ...] = (), address: str = "host:8002") -> str:
    """The view as printed."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(view(found, address, found.started_at + 61, history))
    return out.getvalue()


def test_rates_are_per_second() -> None:
    found = figures(reading(10, 100, 2, 1.0, 1e9), reading(14, 500, 6, 3.0, 5e9))
    assert found.seconds == 4
    assert found.requests == 101
    attend = found.operations["attend"]
    assert (attend.requests, attend.failed) == (101, 1)
    assert attend.p50 == pytest.approx(0.0005)
    assert set(found.operations) == {"attend"}, "nobody has ever applied"
    assert found.codes == {"OK": 100, "INTERNAL": 1}
    assert found.device.use == 0.5
    assert found.load.fullest == ("requests", 0.75)
    assert found.callers == {"[bold]search": 1e9}
    assert "callers     [bold]search 100%" in text(found), "names are no markup"
    assert (found.version, found.device.name, found.state) == ("1.2.3", "cpu", "serving")


@pytest.mark.parametrize(("waiting", "bound"), [(15.0, "requests"), (16.0, "seconds")])
def test_few_requests_are_no_queue_however_long_they_take(waiting: float, bound: str) -> None:
    load = Load(waiting, 0.0, {"requests": 10.0, "seconds": 3.0}, {"requests": 100.0, "seconds": 1.0})
    assert load.fullest[0] == bound
    assert math.isnan(Load(0.0, 0.0, {}, {}).fullest[1])


def test_a_server_that_was_started_anew_has_done_nothing_before() -> None:
    found = figures(reading(0, 100_000), reading(2, 10))
    assert found.requests == 5
    assert found.codes == {"OK": 5}


def test_nothing_between_two_readings_is_no_latency() -> None:
    found = figures(reading(0, 100), reading(1, 100))
    assert found.requests == 0
    assert math.isnan(found.operations["attend"].p99)
    assert math.isnan(found.batches.mean_requests)
    assert "nan" not in text(found)


def test_a_server_that_does_not_answer_is_not_shown_as_serving() -> None:
    found, out = figures(reading(0, 100), reading(1, 100)), io.StringIO()
    shown = view(found, "host:8002", found.started_at + 61, gone_since=found.started_at + 50)
    Console(file=out, width=80, highlight=False).print(shown)
    assert "no answer for 0:00:11" in out.getvalue()
    assert "serving" not in out.getvalue()
    assert "up 0" not in out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_view_fits(width: int) -> None:
    shown = text(figures(reading(0, 0), reading(1, 1234, 7, 0.25)), width, tuple(range(40)))
    assert max(map(len, shown.splitlines())) <= width
    assert len(shown.splitlines()) < 24, "with a line of its own for what is said, it fits the smallest terminals"
    for words in ("1,241 requests/s", "25% in use", "75% of the limit on requests", "serving, up 0:01:01", "▁", "█"):
        assert words in shown
    assert "…" not in shown


def test_of_many_operations_the_usual_ones_are_shown() -> None:
    lines = [f'attnserve_requests_total{{{{operation="made{n}",code="OK"}}}} {n}' for n in range(1, 9)]
    page = PAGE.replace("# TYPE attnserve_request_duration", "\n".join([*lines, "# TYPE attnserve_request_duration"]))
    samples = Reading.parse(page.format(ok=1234, failed=0, busy=0, flops=0)).samples
    shown = text(figures(Reading(samples, 0), Reading(samples, 1)))
    named = [line.split()[0] for line in shown.splitlines() if line.startswith(("attend", "made"))]
    assert named == ["attend", "made8", "made7", "made6", "made5", "made4"]
    assert "\n3 more" in shown


@pytest.mark.parametrize("port", [8002, 34655])
def test_the_address_stands_apart_from_the_version(port: int) -> None:
    """Even if the two fill the line, and the version goes on in the next."""
    address = f"http://127.0.0.1:{port}/metrics"
    assert f"{address}  " in text(figures(reading(0, 0), reading(1, 1)), address=address)


def test_what_is_shown_is_there(server: Server) -> None:
    """Every metric that is asked for is one of a server's; only those with a GPU have its memory."""
    with urllib.request.urlopen(f"http://{server.http_address}/metrics") as reply:
        page = reply.read().decode()
    asked: set[str] = set()

    class Asked(Reading):
        """Notes the names of the samples that are asked for."""

        def total(self, name: str, **labels: str) -> float:
            asked.add(name)
            return super().total(name, **labels)

        def labels(self, name: str) -> dict[str, str]:
            asked.add(name)
            return super().labels(name)

        def by(self, name: str, label: str) -> dict[str, float]:
            asked.add(name)
            return super().by(name, label)

        def quantile(self, q: float, name: str, **labels: str) -> float:
            asked.add(name)
            return super().quantile(q, name, **labels)

    figures(Asked.parse(page), Asked.parse(page))
    there = set(re.findall("^# TYPE ([^ ]+) ", page, re.MULTILINE))
    missing = {name for name in asked if re.sub("_(count|sum)$", "", name) not in there}
    assert missing == {"attnserve_device_memory_bytes"}
    assert len(asked) > 25
