"""What `attnserve top` computes from two readings of the metrics, and how it shows that."""

from __future__ import annotations

import io
import math
import re
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from conftest import Server
from rich.console import Console

from attnserve._commands.reading import Reading
from attnserve._commands.top_figures import Batches, Caches, Device, Figures, Load, Operation, figures, without_nan
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

EVERYTHING = """
attnserve_build_info{version="1.2.3",torch="2.13.0",device="cuda:0"} 1
attnserve_state{state="starting"} 0
attnserve_state{state="draining"} 1
process_start_time_seconds 1000
attnserve_requests_total{operation="attend",code="OK"} 88
attnserve_requests_total{operation="attend",code="INTERNAL"} 2
attnserve_requests_total{operation="attend",code="UNAVAILABLE"} 4
attnserve_requests_total{operation="attend",code="NOT_FOUND"} 6
attnserve_requests_total{operation="apply",code="OK"} 20
attnserve_request_duration_seconds_bucket{operation="attend",le="0.5"} 50
attnserve_request_duration_seconds_bucket{operation="attend",le="0.75"} 50
attnserve_request_duration_seconds_bucket{operation="attend",le="1"} 100
attnserve_request_duration_seconds_bucket{operation="attend",le="+Inf"} 100
attnserve_request_duration_seconds_bucket{operation="apply",le="1"} 0
attnserve_request_duration_seconds_bucket{operation="apply",le="3"} 20
attnserve_request_duration_seconds_bucket{operation="apply",le="+Inf"} 20
attnserve_request_phase_duration_seconds_count{phase="queue"} 16
attnserve_request_phase_duration_seconds_sum{phase="queue"} 4
attnserve_request_phase_duration_seconds_count{phase="compute"} 8
attnserve_request_phase_duration_seconds_sum{phase="compute"} 4
attnserve_query_tokens_total 3000
attnserve_flops_total 4e9
attnserve_received_bytes_total 10240
attnserve_sent_bytes_total 6291456
attnserve_streams 5
attnserve_rejected_requests_total{reason="queue_full"} 10
attnserve_cancelled_requests_total{reason="deadline"} 12
attnserve_queue_requests 16
attnserve_queue_bytes 2048
attnserve_in_flight_requests 17
attnserve_in_flight_seconds 3
attnserve_in_flight_limit{bound="requests"} 4096
attnserve_in_flight_limit{bound="seconds"} 4
attnserve_batch_requests_count 20
attnserve_batch_requests_sum 60
attnserve_batch_requests_bucket{le="2"} 10
attnserve_batch_requests_bucket{le="4"} 20
attnserve_batch_requests_bucket{le="+Inf"} 20
attnserve_batch_padding_ratio_count 20
attnserve_batch_padding_ratio_sum 5
attnserve_kernel_calls_total{kernel="cuda_varlen"} 14
attnserve_device_busy_seconds_total 1.5
attnserve_device_batch_seconds 2.5
attnserve_device_memory_bytes{state="allocated"} 3221225472
attnserve_event_loop_busy_seconds_total 0.25
process_cpu_seconds_total 3
process_resident_memory_bytes 1073741824
attnserve_caches 18
attnserve_cache_tokens 19
attnserve_cache_pool_bytes{state="free"} 786432
attnserve_cache_pool_bytes{state="used"} 262144
attnserve_cache_appended_tokens_total 42
attnserve_cache_forks_total 44
attnserve_cache_evictions_total{reason="ttl"} 46
attnserve_layer_flops_total{layer="encoder"} 1e9
attnserve_layer_flops_total{layer="decoder"} 3e9
attnserve_caller_flops_total{caller="search"} 2e9
"""
"""Of two seconds, before which there was nothing; no two figures are alike."""


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


@pytest.fixture
def everything() -> Figures:
    return figures(Reading({}, 10.0), Reading(Reading.parse(EVERYTHING).samples, 12.0))


def test_every_figure_is_that_of_its_metric(everything: Figures) -> None:
    assert everything == Figures(
        seconds=2.0,
        version="1.2.3",
        torch="2.13.0",
        state="draining",
        started_at=1000.0,
        requests=60.0,
        query_tokens=1500.0,
        flops=2e9,
        received_bytes=5120.0,
        sent_bytes=3 * 2**20,
        streams=5.0,
        operations={"attend": Operation(50.0, 3.0, 0.5, 0.995), "apply": Operation(10.0, 0.0, 2.0, 2.98)},
        codes={"OK": 54.0, "NOT_FOUND": 3.0, "UNAVAILABLE": 2.0, "INTERNAL": 1.0},
        rejected={"queue_full": 5.0},
        cancelled={"deadline": 6.0},
        phases={"queue": 0.25, "compute": 0.5},
        load=Load(16.0, 2048.0, {"requests": 17.0, "seconds": 3.0}, {"requests": 4096.0, "seconds": 4.0}),
        batches=Batches(10.0, 3.0, 3.96, 0.25, {"cuda_varlen": 7.0}),
        device=Device("cuda:0", 0.75, 2.5, {"allocated": 3 * 2.0**30}, 0.125, 1.5, 2.0**30),
        caches=Caches(18.0, 19.0, {"free": 786432.0, "used": 262144.0}, 21.0, 22.0, {"ttl": 23.0}),
        layers={"decoder": 1.5e9, "encoder": 5e8},
        callers={"search": 1e9},
    )
    assert list(everything.layers) == ["decoder", "encoder"], "the largest first"


def test_every_figure_is_shown(everything: Figures) -> None:
    shown = re.sub(" +", " ", text(everything, 160, (1.0, 2.0, 0.0)))
    for words in (
        "attnserve 1.2.3 on cuda:0, torch 2.13.0, draining, up 0:01:01",
        "operation requests/s p50 p99 failed/s",
        "attend 50 500 ms 995 ms 3",
        "apply 10 2 s 2.98 s 0",
        "throughput 60 requests/s ▄█",
        "1,500 tokens/s, 2 GFLOP/s, 5 KiB/s in, 3 MiB/s out, 5 streams",
        "16 waiting (2 KiB), 17 in flight, work of 3 s",
        "█████████··· 75% of the limit on seconds",
        "10/s of 3.0 requests (p99: 4.0), 25% padding",
        "█████████··· 75% in use, the same batch for 2.5 s",
        "event loop 12% in use, 1.5 processors, 1 GiB resident, 3 GiB allocated",
        "queue 250 ms, compute 500 ms",
        "refused queue_full 5/s",
        "cancelled deadline 6/s",
        "callers search 100%",
        "███········· 256 KiB of 1 MiB",
        "18 open, 19 tokens, 21 appended/s, 22 forks/s, 23 evicted/s",
        "layers decoder 75%, encoder 25%",
        "kernels cuda_varlen 7/s",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"requests": 0.0}, "throughput 0 requests/s"),
        ({"requests": 0.04567}, "throughput 0.0457 requests/s"),
        ({"requests": 99.5}, "throughput 99.5 requests/s"),
        ({"requests": 123.4}, "throughput 123 requests/s"),
        ({"sent_bytes": 1023.4}, " 1023 B/s out"),
        ({"sent_bytes": 1024.0}, " 1 KiB/s out"),
        ({"sent_bytes": 2.5 * 2**40}, " 2.5 TiB/s out"),
        ({"flops": 999.0}, " 999 FLOP/s"),
        ({"flops": 1000.0}, " 1 kFLOP/s"),
        ({"flops": 1.5e15}, " 1.5 PFLOP/s"),
        ({"phases": {"queue": 9e-4, "compute": 0.0012}}, "phases queue 900 µs, compute 1.2 ms"),
        ({"phases": {"queue": 1e-3, "compute": 1.0}}, "phases queue 1 ms, compute 1 s"),
        ({"callers": {"ann": 9.0, "bob": 1.0}}, "callers ann 90%, bob 10% caches"),
        ({"rejected": {}}, "16 waiting"),
        ({"rejected": dict.fromkeys("abcd", 1.0)}, "refused a 1/s, b 1/s, c 1/s, d 1/s cancelled"),
        ({"rejected": dict.fromkeys("abcde", 1.0)}, "refused a 1/s, b 1/s, c 1/s, d 1/s, 1 more cancelled"),
        ({"operations": {}}, "no requests yet"),
    ],
    ids=str,
)
def test_numbers_have_units_and_few_digits(everything: Figures, changed: dict[str, Any], words: str) -> None:
    shown = text(replace(everything, **changed), 160)
    assert words in re.sub(r"\s+", " ", shown)
    assert ("refused" in shown) == bool(changed.get("rejected", True)), "what there is none of has no line"


def test_shares_are_of_what_there_is(everything: Figures) -> None:
    """A busy device may be measured a little longer than the time between two readings; a small share has a decimal."""
    device = replace(everything.device, use=1.02, loop=0.0123, batch_seconds=0.9)
    caches = replace(everything.caches, pool={})
    load = replace(everything.load, in_flight={"requests": 0.0})
    shown = text(replace(everything, device=device, caches=caches, load=load), 160, (0.0, 0.0))
    assert " ████████████ 102% in use\n" in re.sub(" +\n", "\n", shown)
    assert "event loop 1.2% in use" in shown
    assert "············ 0 B of 0 B" in shown
    assert "work of" not in shown
    assert "············ 0% of the limit on requests" in shown


@pytest.mark.parametrize(("seconds", "told"), [(1.0, False), (1.5, True)])
def test_a_batch_that_takes_more_than_a_second_is_told(everything: Figures, seconds: float, told: bool) -> None:
    device = replace(everything.device, batch_seconds=seconds)
    assert (f"the same batch for {seconds:g} s" in text(replace(everything, device=device), 160)) == told


def test_the_first_line_has_the_address_on_the_left_and_the_server_on_the_right(everything: Figures) -> None:
    line = text(everything, 120).splitlines()[0].rstrip()
    assert re.fullmatch("host:8002 {30,}attnserve .* up 0:01:01", line)
    assert len(line) >= 118


@pytest.mark.parametrize(("state", "colour"), [("serving", 32), ("draining", 31)])
def test_a_server_that_does_not_serve_is_red_and_so_is_what_has_failed(
    everything: Figures, state: str, colour: int
) -> None:
    out = io.StringIO()
    coloured = Console(file=out, width=100, force_terminal=True, color_system="standard")
    coloured.print(view(replace(everything, state=state), "host:8002", 1061.0))
    assert re.search(rf"\x1b\[1;{colour}m{state}", out.getvalue())
    assert re.search(r"\x1b\[1;31m *3\x1b", out.getvalue())


def test_a_server_whose_clock_is_ahead_has_just_started(everything: Figures) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(view(everything, "host:8002", everything.started_at - 3))
    assert "draining, up 0:00:00" in out.getvalue()


def test_what_json_cannot_express_is_null() -> None:
    assert without_nan({"a": [math.nan, 1.0], "b": (math.inf, {"c": -math.inf}), "d": "nan"}) == {
        "a": [None, 1.0],
        "b": [None, {"c": None}],
        "d": "nan",
    }


def test_the_fullest_bound_is_shown_however_few_wait_beside_those_that_are_computed() -> None:
    load = Load(13.0, 0.0, {"requests": 10.0, "seconds": 3.0}, {"requests": 100.0, "seconds": 3.0})
    assert load.fullest == ("seconds", 1.0)
    assert math.isnan(Load(0.0, 0.0, {}, {}).fullest[1])


def test_a_server_that_was_started_anew_has_done_nothing_before() -> None:
    found = figures(reading(7, 100_000), reading(9, 10))
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
    lines = [f'attnserve_requests_total{{{{operation="made{n}",code="OK"}}}} {n}' for n in range(1, 7)]
    page = PAGE.replace("# TYPE attnserve_request_duration", "\n".join([*lines, "# TYPE attnserve_request_duration"]))
    samples = Reading.parse(page.format(ok=1234, failed=0, busy=0, flops=0)).samples
    shown = text(figures(Reading(samples, 0), Reading(samples, 1)))
    named = [line.split()[0] for line in shown.splitlines() if line.startswith(("attend", "made"))]
    assert named == ["attend", "made6", "made5", "made4", "made3", "made2"]
    assert "\n1 more" in shown


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
