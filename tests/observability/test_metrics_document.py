"""docs/metrics.md: what it lists is what servers tell, in the same words."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import certificates
import numpy as np
import pytest
from prometheus_client import Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from attnserve import TLS, Client
from attnserve_server.observability import scraped
from scripts import metrics_table

if TYPE_CHECKING:
    from tests.conftest import Server

TEXT = metrics_table.DOCUMENT.read_text("utf-8")


def told(exposed: str) -> dict[str, tuple[str, str, set[str]]]:
    """The type, description and labels of each metric in what a server tells Prometheus."""
    return {
        family.name: (
            family.type,
            family.documentation,
            {label for sample in family.samples for label in sample.labels if label != "le"},
        )
        for family in parse_text(exposed)
    }


def rows() -> dict[str, list[str]]:
    """The rows of the document's tables, by the name of their metric."""
    cells = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.skipif(sys.platform != "linux", reason="metrics of the process are there on Linux only")
def test_the_document_shows_the_metrics_as_they_are() -> None:
    assert metrics_table.with_tables(TEXT) == TEXT, "run: make docs"


def test_everything_that_is_read_when_scraped_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what only some servers have."""
    made = {
        name: Mock(wraps=each)
        for name, each in vars(scraped).items()
        if getattr(each, "__module__", None) == scraped.__name__ and not name.startswith("_") and name != "Reading"
    }
    for name, each in made.items():
        monkeypatch.setattr(scraped, name, each)
    metrics_table.registry()
    assert "certificate" in made
    assert [name for name, each in made.items() if not each.called] == []


def test_a_server_has_no_metrics_but_those_listed(start_server: Callable[..., Server], tmp_path: Path) -> None:
    authority = certificates.Authority(tmp_path)
    files = authority.issue_for_server()
    server = start_server("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    one = np.ones((1, 2, 8), np.float32)
    with Client(server.address, tls=TLS(authority.ca)) as client:
        client.attend(one, one, one)
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=60) as response:
        served = told(response.read().decode())
    listed = told(generate_latest(metrics_table.registry()).decode())
    assert served.keys() <= listed.keys()
    # A CPU has no memory of its own.
    assert listed.keys() - served.keys() == {"attnserve_device_memory_bytes"}
    for name, (kind, help, labels) in served.items():
        assert (kind, help) == listed[name][:2]
        assert labels in (set(), listed[name][2]), name


def test_names_are_those_that_prometheus_shows() -> None:
    exposed = generate_latest(metrics_table.registry()).decode()
    names = [line.split()[2] for line in exposed.splitlines() if line.startswith("# TYPE")]
    assert len(set(names)) == len(names), "each is declared once"
    assert rows().keys() == set(names)
    assert rows()["attnserve_requests_total"][:2] == ["counter", "`operation`, `code`"]
    assert "attnserve_tls_certificate_expiry_timestamp_seconds" in names


def test_histograms_have_their_units_and_bounds() -> None:
    for name, (kind, *_) in rows().items():
        assert (f"- Buckets of `{name}`, in " in TEXT) == (kind == "histogram")
    bounds = "`1.0`, `2.0`, `4.0`, `8.0`, `16.0`, `32.0`, `64.0`, `128.0`, `256.0`, `+Inf`"
    assert f"- Buckets of `attnserve_batch_requests`, in requests: {bounds}\n" in TEXT


def test_values_that_a_server_can_add_to_are_not_listed() -> None:
    assert "- `phase` of `attnserve_request_phase_duration_seconds`: `decode`, `queue`, `staging`" in TEXT
    assert "- `caller` of" not in TEXT
    assert "`any`" not in TEXT


def test_a_metric_without_a_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = metrics_table.registry()
    Gauge("attnserve_unheard_of", "A metric.", registry=registry)
    monkeypatch.setattr(metrics_table, "registry", lambda: registry)
    with pytest.raises(ValueError, match="attnserve_unheard_of is in no group"):
        metrics_table.markdown()


def test_a_document_without_the_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="metrics"):
        metrics_table.with_tables("# A page\n<!-- metrics -->\n")
