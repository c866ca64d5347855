"""Every overlay and every combination of components renders to manifests that the API server accepts.

Kubernetes' own kinds are checked strictly against its published schemas (PyPI's kubernetes-validate): an unknown field
is an error. Custom resources are checked against the models that PyPI's cloudcoil.models.* derive from the definitions
published by cert-manager, KEDA and the Prometheus operator.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.cert_manager import v1 as cert_manager
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator
from manifests import (
    AUTOSCALINGS,
    DEPLOY,
    Manifest,
    Rendered,
    combinations,
    combine,
    components,
    needs_kubectl,
    render,
)

pytestmark = needs_kubectl

KUBERNETES = ("1.30", kubernetes_validate.latest_version())
"""The oldest version with everything used here (preStop's sleep), and the newest with published schemas."""
CUSTOM: dict[tuple[str, str], Any] = {
    ("cert-manager.io/v1", "Certificate"): cert_manager.Certificate,
    ("cert-manager.io/v1", "Issuer"): cert_manager.Issuer,
    ("keda.sh/v1alpha1", "ScaledObject"): keda.ScaledObject,
    ("monitoring.coreos.com/v1", "PodMonitor"): prometheus_operator.PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): prometheus_operator.PrometheusRule,
}
NEWER_THAN_MODELS = "behavior" not in keda.Fallback.model_fields
"""Whether the models of KEDA lack `fallback.behavior`, as those of 2.16 do, the last for Python before 3.14. Those of
2.20 have it, with the value that is used here.
"""
CLUSTER_WIDE = ("Namespace",)
SECRETS = {
    name
    for path in DEPLOY.glob("overlays/*/kustomization.yaml")
    for name in re.findall(r"^# .*\bcreate secret generic (\S+)", path.read_text("utf-8"), re.MULTILINE)
}
"""Those that an overlay tells its reader to make."""


def renderings() -> list[Any]:
    """Test parameters that render every overlay and combination."""
    directories = [DEPLOY / "base", *sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml"))]
    made: list[tuple[str, Callable[[], Rendered]]] = [
        (str(directory.relative_to(DEPLOY)), lambda directory=directory: render(directory)) for directory in directories
    ]
    made += [("+".join(names), lambda names=names: combine(*names)) for names in combinations() if names]
    return [pytest.param(make, id=name) for name, make in made]


@pytest.fixture(params=renderings())
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """Everything that can be rendered, one after another."""
    made: Rendered = request.param()
    return made


@cache
def fault(text: str) -> str | None:
    """The fault in a manifest, if any. The manifest is JSON for caching: the same one is in many renderings."""
    manifest = json.loads(text)
    model = CUSTOM.get((manifest["apiVersion"], manifest["kind"]))
    if model is keda.ScaledObject and NEWER_THAN_MODELS:
        del manifest["spec"]["fallback"]["behavior"]
        text = json.dumps(manifest)
    try:
        if model is not None:
            model.model_validate_json(text, strict=True, extra="forbid", by_alias=True, by_name=False)
        else:
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)
    except (ValueError, kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return str(error)
    return None


def identity(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["kind"], manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]


def test_manifests_are_as_their_schemas_say(rendered: Rendered) -> None:
    faults = {identity(manifest): fault(json.dumps(manifest, sort_keys=True)) for manifest in rendered.manifests}
    assert not {name: found for name, found in faults.items() if found is not None}


def test_everything_has_one_name_in_one_namespace(rendered: Rendered) -> None:
    identities = [identity(manifest) for manifest in rendered.manifests]
    assert len(set(identities)) == len(identities)
    spaces = {namespace for kind, namespace, _ in identities if kind not in CLUSTER_WIDE}
    (namespace,) = rendered.of_kind("Namespace")
    assert spaces == {namespace["metadata"]["name"]}


def test_what_is_referred_to_is_there(rendered: Rendered) -> None:
    labels = rendered.workload["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in rendered.container["ports"]}
    selectors = [(service, service["spec"]["selector"]) for service in rendered.of_kind("Service")]
    selectors += [
        (manifest, manifest["spec"][field]["matchLabels"])
        for kind, field in (
            ("PodDisruptionBudget", "selector"),
            ("NetworkPolicy", "podSelector"),
            ("PodMonitor", "selector"),
        )
        for manifest in rendered.of_kind(kind)
    ]
    selectors += [(rendered.workload, rendered.workload["spec"]["selector"]["matchLabels"])]
    selectors += [
        (rendered.workload, constraint["labelSelector"]["matchLabels"])
        for constraint in rendered.pod["topologySpreadConstraints"]
    ]
    for manifest, selector in selectors:
        assert selector.items() <= labels.items(), identity(manifest)

    for service in rendered.of_kind("Service"):
        (port,) = service["spec"]["ports"]
        assert port["port"] == ports[port["targetPort"]]
    for policy in rendered.of_kind("NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= ports.keys()
            assert rule["from"]
    for monitor in rendered.of_kind("PodMonitor"):
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports.keys()
    for scaler in rendered.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"], target["name"]) == (
            rendered.workload["apiVersion"],
            rendered.workload["kind"],
            rendered.workload["metadata"]["name"],
        )
        assert "replicas" not in rendered.workload["spec"]
    if rendered.workload["kind"] == "StatefulSet":
        service = rendered.named("Service", rendered.workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
    assert rendered.named("ServiceAccount", rendered.pod["serviceAccountName"])
    made = {certificate["spec"]["secretName"] for certificate in rendered.of_kind("Certificate")}
    secrets = {volume["secret"]["secretName"] for volume in rendered.pod["volumes"] if "secret" in volume}
    secrets |= {issuer["spec"]["ca"]["secretName"] for issuer in rendered.of_kind("Issuer") if "ca" in issuer["spec"]}
    credentials = {
        endpoint["authorization"]["credentials"]["name"]
        for monitor in rendered.of_kind("PodMonitor")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        if "authorization" in endpoint
    }
    assert secrets | credentials <= made | SECRETS
    for certificate in rendered.of_kind("Certificate"):
        issuer = certificate["spec"]["issuerRef"]
        assert rendered.named(issuer["kind"], issuer["name"])
    volumes = {volume["name"] for volume in rendered.pod["volumes"]}
    assert {mount["name"] for mount in rendered.container["volumeMounts"]} == volumes
    assert rendered.config  # raises if the server would reject it


def test_a_field_that_is_not_there_is_found() -> None:
    for names in combinations():
        for manifest in combine(*names).manifests:
            if "spec" in manifest:
                assert fault(json.dumps(manifest | {"spec": manifest["spec"] | {"nothing": 1}})), identity(manifest)


def test_the_order_of_components_does_not_matter() -> None:
    # Conflicts between components show in pairs; all at once is tested to be sure. But tls comes last, because it
    # patches how the objects of monitoring read the metrics.
    most = len(components()) - len(AUTOSCALINGS) + 1
    for names in combinations():
        if len(names) in (2, most):
            others = [name for name in names if name != "tls"]
            reverse = (*reversed(others), *(name for name in names if name == "tls"))
            assert _by_identity(combine(*names)) == _by_identity(combine(*reverse)), names
            if "monitoring" not in names:
                assert _by_identity(combine(*names)) == _by_identity(combine(*reversed(names))), names


def test_a_wrong_order_of_components_is_refused() -> None:
    with pytest.raises(AssertionError, match="readinessProbe/grpc"):
        combine("tls", "monitoring")


def test_a_gpu_for_an_image_that_was_chosen_before_is_refused(tmp_path: Path) -> None:
    """It would be the one for CPUs."""
    relative = os.path.relpath(DEPLOY, tmp_path.resolve())
    kustomization = {"resources": [f"{relative}/overlays/layers"], "components": [f"{relative}/components/gpu"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    with pytest.raises(AssertionError, match="containers/0/image"):
        render(tmp_path)


def _by_identity(rendered: Rendered) -> dict[tuple[str, str, str], Manifest]:
    return {identity(manifest): _sorted(manifest) for manifest in rendered.manifests}


def _sorted(value: Any) -> Any:
    """A manifest with its lists sorted, so that their order does not matter."""
    if isinstance(value, dict):
        return {key: _sorted(part) for key, part in value.items()}
    if isinstance(value, list):
        return sorted(map(_sorted, value), key=lambda part: json.dumps(part, sort_keys=True))
    return value


ELSEWHERE = next(
    yaml.safe_load(block)
    for block in re.findall(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text("utf-8"), re.DOTALL)
    if "namespace:" in block
)
"""What the document says for another namespace."""


@pytest.mark.parametrize("autoscaling", AUTOSCALINGS)
def test_everything_may_be_in_another_namespace(autoscaling: str) -> None:
    namespace, (replacement,) = ELSEWHERE["namespace"], ELSEWHERE["replacements"]
    names = (*(name for name in components() if name not in (*AUTOSCALINGS, "tls")), autoscaling, "tls")
    kinds = {manifest["kind"] for manifest in combine(*names).manifests}
    targets = [target for target in replacement["targets"] if target["select"]["kind"] in kinds]
    rendered = combine(*names, more={**ELSEWHERE, "replacements": [replacement | {"targets": targets}]})
    assert rendered.of_kind("Namespace")[0]["metadata"]["name"] == namespace
    assert {manifest["metadata"].get("namespace", namespace) for manifest in rendered.manifests} == {namespace}
    names_of_services = list(rendered.named("Certificate", "attnserve")["spec"]["dnsNames"])
    for endpoint in rendered.named("PodMonitor", "attnserve")["spec"]["podMetricsEndpoints"]:
        assert endpoint["tlsConfig"]["serverName"] in names_of_services
    assert {name.removeprefix("*.").split(".")[1] for name in names_of_services} == {namespace}
    for scaler in rendered.of_kind("ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            assert f'{{namespace="{namespace}"}}' in trigger["metadata"]["query"]
    assert rendered.config.advertise_address == f"attnserve-0.attnserve-owners.{namespace}:8001"


def test_everything_may_have_a_label() -> None:
    (labels,) = re.findall(r"`labels: (\[.+?\])`", (DEPLOY / "README.md").read_text("utf-8"))
    found = combine("monitoring", more={"labels": yaml.safe_load(labels)})
    for kind in ("PodMonitor", "PrometheusRule"):
        assert found.of_kind(kind)[0]["metadata"]["labels"]["release"] == "prometheus"
    assert "release" not in found.workload["spec"]["selector"]["matchLabels"]


def test_the_document_has_every_component() -> None:
    text = (DEPLOY / "README.md").read_text()
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == components()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert all((DEPLOY / link).exists() for link in links)
