"""The rules and the dashboard as files: promtool and Grafana's own types accept them, and every alert has its tests and
its page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_server import MONITORING, RULES, promtool

OPERATIONS = (MONITORING.parents[1] / "docs" / "operations.md").read_text("utf-8")
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
RECORDS = [rule for group in RULES["groups"] for rule in group["rules"] if "record" in rule]
TESTS: list[dict[str, Any]] = yaml.safe_load((MONITORING / "rules_test.yaml").read_text("utf-8"))["tests"]
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))


def test_promtool_finds_no_fault() -> None:
    promtool("check", "config", str(MONITORING / "prometheus.yaml"))
    promtool("check", "rules", str(MONITORING / "rules.yaml"))


@pytest.mark.parametrize("file", ["rules_test.yaml", "thresholds_test.yaml"])
def test_alerts_come_when_they_must_and_only_then(file: str) -> None:
    promtool("test", "rules", str(MONITORING / file))


def test_what_is_recorded_has_the_window_that_its_name_says() -> None:
    for rule in RECORDS:
        said = re.findall(r"(?:rate|mean|_)(\d+[mhd])$", rule["record"])
        assert set(re.findall(r"\[(\w+)\]", rule["expr"])) == set(said), rule["record"]


def test_error_ratios_differ_in_their_windows_only() -> None:
    ratios = [rule["expr"] for rule in RECORDS if rule["record"].startswith("attnserve:errors:ratio_rate")]
    assert len(ratios) == 7
    assert len({re.sub(r"\[\w+\]", "", ratio) for ratio in ratios}) == 1


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_both_ways(name: str) -> None:
    cases = [case for test in TESTS for case in test.get("alert_rule_test", ()) if case["alertname"] == name]
    assert any(case["exp_alerts"] for case in cases), "it is never seen to come"
    assert any(not case["exp_alerts"] for case in cases), "it is never seen to stay away"


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_section_that_says_what_to_do(name: str) -> None:
    annotations = ALERTS[name]["annotations"]
    assert annotations["runbook_url"] == f"operations.md#{name.lower()}"
    assert annotations["summary"].endswith(".")
    assert ALERTS[name]["labels"]["severity"] in ("critical", "warning")
    section = re.search(rf"^### {name}\n(.+?)(?=^##|\Z)", OPERATIONS, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/operations.md has no section {name}"
    assert len(section[1].split()) > 30, "it says too little"


def test_operations_tells_of_no_alert_that_is_not_there() -> None:
    assert set(re.findall(r"\bAttnserve[A-Z]\w+", OPERATIONS)) == set(ALERTS)


def test_operations_links_to_what_is_there() -> None:
    docs = MONITORING.parents[1] / "docs"
    targets = re.findall(r"\]\(([^)#]+)", OPERATIONS)
    assert len(targets) > 5
    assert [target for target in targets if not (docs / target).exists()] == []


def test_grafana_knows_every_word_of_the_dashboard() -> None:
    """Grafana ignores fields that it does not know, and then shows something other than intended."""
    register_default_plugins()
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    # Fields that only the data source or the editor reads.
    theirs = re.compile(r"annotations\.list\.\d+\.(title|text)Format|templating\.list\.\d+\.definition")
    assert [path for path in _lost(DASHBOARD, known) if not theirs.fullmatch(path)] == []


def _lost(given: Any, known: Any, path: str = "") -> Iterator[str]:
    """The paths of everything in `given` that is missing from `known` or differs there."""
    if isinstance(given, dict | list) and type(given) is type(known):
        items = given.items() if isinstance(given, dict) else enumerate(given)
        for key, value in items:
            there = key in known if isinstance(known, dict) else key < len(known)
            yield from _lost(value, known[key] if there else None, f"{path}.{key}".lstrip("."))
    elif given != known:
        yield path


def test_panels_have_places_of_their_own() -> None:
    panels = [panel for row in DASHBOARD["panels"] for panel in (row, *row.get("panels", ()))]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    titles = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert titles[:5] == ["Is it up?", "Is it fast?", "Is it full?", "Who uses it?", "What does a batch look like?"]


def test_panels_say_what_they_show() -> None:
    for row in DASHBOARD["panels"]:
        for panel in (row, *row.get("panels", ())):
            if panel["type"] != "row":
                assert panel["description"].endswith("."), panel["title"]
                assert panel["targets"], panel["title"]
                assert panel["datasource"]["uid"] == "${datasource}"
