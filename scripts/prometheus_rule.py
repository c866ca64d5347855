"""The Prometheus rules in the form that the Prometheus operator takes.

In: deploy/monitoring/rules.yaml, a file in Prometheus's own format, which promtool checks and tests. Out: a
PrometheusRule with the same rules and comments; kustomize cannot make it, since it includes no file in another.

    python scripts/prometheus_rule.py    writes it
"""

from __future__ import annotations

import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy" / "monitoring" / "rules.yaml"
RESOURCE = ROOT / "deploy" / "components" / "monitoring" / "prometheusrule.yaml"

_HEAD = """\
# Written by scripts/prometheus_rule.py from deploy/monitoring/rules.yaml: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: attnserve
spec:
"""


def resource(rules: str) -> str:
    """The PrometheusRule for a file of rules, both as text."""
    return _HEAD + textwrap.indent(rules, "  ")


if __name__ == "__main__":
    RESOURCE.write_text(resource(RULES.read_text("utf-8")), "utf-8")
