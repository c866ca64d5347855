"""Metrics in a cluster: every metric that is referred to by name is exposed by a server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Server
from manifests import DEPLOY, ROOT, combine, needs_kubectl
from prometheus_client.parser import text_string_to_metric_families

from attnserve_server.scheduling.admission import ALWAYS_WAIT
from scripts import prometheus_rule


@pytest.fixture(scope="module")
def series(server: Server) -> dict[str, set[str]]:
    """The labels of every series that a server exposes, by the series' name."""
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


_VALUES = yaml.safe_load((DEPLOY / "components/autoscaling/adapter.yaml").read_text())
ADAPTER: list[dict[str, Any]] = _VALUES["rules"]["custom"]


def scaling_queries() -> Iterator[str]:
    """The Prometheus queries for autoscaling."""
    for rule in ADAPTER:
        yield from (rule["seriesQuery"], rule["metricsQuery"])
    scaled = yaml.safe_load((DEPLOY / "components/autoscaling-keda/scaledobject.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        yield trigger["metadata"]["query"]


def measured(query: str) -> str:
    """The single series that a query is about."""
    (name,) = set(re.findall(r"attnserve_\w+", query))
    return name


def test_what_autoscaling_asks_for_is_measured(series: dict[str, set[str]]) -> None:
    assert {measured(query) for query in scaling_queries()} <= series.keys()


@pytest.mark.skipif(
    shutil.which("promtool") is None and "REQUIRE_PROMETHEUS" not in os.environ,
    reason="promtool, which reads queries, is not here",
)
def test_what_autoscaling_asks_is_a_query(tmp_path: Path) -> None:
    rules = [
        # The adapter's placeholders, filled in.
        {
            "record": f"query:{number}",
            "expr": query.replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="a"'),
        }
        for number, query in enumerate(scaling_queries())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_adapter_says_whose_a_metric_is() -> None:
    for rule in ADAPTER:
        assert measured(rule["seriesQuery"]) == measured(rule["metricsQuery"])
        # The labels that identify a pod: series scraped by the PodMonitor have both.
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}


@needs_kubectl
def test_both_autoscalings_want_the_same() -> None:
    (horizontal,) = combine("autoscaling").of_kind("HorizontalPodAutoscaler")
    (scaled,) = combine("autoscaling-keda").of_kind("ScaledObject")
    horizontal, scaled = horizontal["spec"], scaled["spec"]
    given = {rule["name"]["as"]: measured(rule["metricsQuery"]) for rule in ADAPTER}
    wanted = {
        given[metric["pods"]["metric"]["name"]]: quantity(metric["pods"]["target"]["averageValue"])
        for metric in horizontal["metrics"]
    }
    assert wanted == {
        measured(trigger["metadata"]["query"]): float(trigger["metadata"]["threshold"])
        for trigger in scaled["triggers"]
    }
    assert wanted.keys() == set(given.values())
    # Targets that an overloaded server reaches: ALWAYS_WAIT requests may always queue, and a busy share is at most 1.
    assert 1 <= wanted["attnserve_queue_requests"] < ALWAYS_WAIT
    for thread in ("device", "event_loop"):
        assert 0.5 <= wanted[f"attnserve_{thread}_busy_seconds_total"] < 1
    assert horizontal["behavior"] == scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (horizontal["minReplicas"], horizontal["maxReplicas"]) == (
        scaled["minReplicaCount"],
        scaled["maxReplicaCount"],
    )
    assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]
    # KEDA's default, static, would remove all others when Prometheus is down.
    assert scaled["fallback"]["behavior"] == "currentReplicasIfHigher"
    down, up = horizontal["behavior"]["scaleDown"], horizontal["behavior"]["scaleUp"]
    assert down["stabilizationWindowSeconds"] >= 300 > up["stabilizationWindowSeconds"]
    assert all(policy["type"] == "Pods" and policy["value"] == 1 for policy in down["policies"])
    # KEDA's query names the namespace.
    (namespace,) = combine("autoscaling-keda").of_kind("Namespace")
    selector = f'{{namespace="{namespace["metadata"]["name"]}"}}'
    assert all(selector in trigger["metadata"]["query"] for trigger in scaled["triggers"])


def quantity(text: str) -> float:
    """Parses a Kubernetes quantity, whole or in thousandths."""
    return int(text[:-1]) / 1000 if text.endswith("m") else int(text)


@needs_kubectl
def test_the_metrics_are_where_the_monitor_looks(server: Server) -> None:
    (monitor,) = combine("monitoring").of_kind("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    with urllib.request.urlopen(f"http://{server.http_address}{endpoint['path']}", timeout=30) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
    labels = combine("monitoring").workload["spec"]["template"]["metadata"]["labels"]
    # The rules and the dashboard know the job by this name.
    assert labels[monitor["spec"]["jobLabel"]] == "attnserve"


def without_line_breaks(value: Any) -> Any:
    """A value with single spaces in all its text."""
    if isinstance(value, dict):
        return {key: without_line_breaks(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_line_breaks(part) for part in value]
    return " ".join(value.split()) if isinstance(value, str) else value


@needs_kubectl
def test_the_rules_are_those_of_prometheus() -> None:
    rules = prometheus_rule.RULES.read_text()
    assert prometheus_rule.RESOURCE.read_text() == prometheus_rule.resource(rules), "make docs writes it anew"
    (resource,) = combine("monitoring").of_kind("PrometheusRule")
    # Kustomize adds meaningless empty lines to multi-line expressions.
    assert without_line_breaks(resource["spec"]) == without_line_breaks(yaml.safe_load(rules))


@needs_kubectl
def test_the_dashboard_is_the_file() -> None:
    found = combine("monitoring").named("ConfigMap", "attnserve-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    dashboard = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
    assert {name: json.loads(text) for name, text in found["data"].items()} == {"attnserve.json": dashboard}
    # `kubectl apply` keeps a copy in an annotation, limited to 256 KiB.
    assert len(json.dumps(found)) < 200_000


def every_command(document: str) -> list[str]:
    """The lines of the shell blocks of a document."""
    return [line for block in re.findall(r"```sh\n(.*?)```", document, re.DOTALL) for line in block.splitlines()]


@needs_kubectl
def test_the_readme_applies_what_is_there() -> None:
    applied = [
        match[1]
        for line in every_command((ROOT / "README.md").read_text())
        if (match := re.search(r"kubectl (?:apply|kustomize)(?: -k)? (deploy/\S+)", line))
    ]
    assert applied
    for directory in applied:
        done = subprocess.run(["kubectl", "kustomize", ROOT / directory], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
