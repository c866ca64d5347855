"""What documents tell people to type and to set, about containers and clusters, is what the manifests have: namespaces,
workloads, services, ports, image tags, labels.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from manifests import DEPLOY, ROOT, Rendered, combine, needs_kubectl, render
from test_render import fault

pytestmark = needs_kubectl

README, GUIDE = ROOT / "README.md", DEPLOY / "README.md"
DOCUMENTS = [README, GUIDE, *sorted((ROOT / "docs").glob("*.md")), *sorted(DEPLOY.glob("overlays/*/*.yaml"))]
"""Overlays have instructions in their comments."""
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in DOCUMENTS}
NAMESPACED = {"create", "delete", "describe", "edit-last-applied", "exec", "get", "logs", "port-forward", "rollout"}
"""What kubectl does in one namespace, by default in that named default."""
HTTP_HOST = r"(?:HOST|127\.0\.0\.1|localhost)"


@pytest.fixture(scope="module")
def base() -> Rendered:
    return render(DEPLOY / "base")


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The words of each complete command of a program: in a shell block, a comment or between backticks."""
    for found in re.findall(rf"\b{program} [^`\n|<]*", text):
        words = shlex.split(found, comments=True)
        # A mention of the program alone, as in prose, has no command.
        if len(words) > 2:
            yield words[1:]


def in_namespace(words: list[str]) -> tuple[str | None, list[str]]:
    """What `-n` says, and the other words."""
    if words[0] != "-n":
        return None, words
    return words[1], words[2:]


def ports(rendered: Rendered) -> dict[str, str]:
    """The ports of a pod, as text, by name."""
    return {port["name"]: str(port["containerPort"]) for port in rendered.container["ports"]}


def namespace(rendered: Rendered) -> str:
    (found,) = rendered.of_kind("Namespace")
    return found["metadata"]["name"]  # type: ignore[no-any-return]


def doors(rendered: Rendered) -> dict[str, dict[str, str]]:
    """The labels of the namespaces that are let in, by port."""
    (policy,) = rendered.of_kind("NetworkPolicy")
    return {
        rule["ports"][0]["port"]: rule["from"][0]["namespaceSelector"]["matchLabels"]
        for rule in policy["spec"]["ingress"]
    }


def test_commands_are_for_what_is_there(base: Rendered) -> None:
    seen: set[str] = set()
    kinds = {kind.lower(): kind for kind in ("Deployment", "StatefulSet", "Service")}
    for name, text in TEXTS.items():
        for words in commands(text, "kubectl"):
            where, rest = in_namespace(words)
            if where is None and not NAMESPACED & set(rest[:2]):
                continue
            assert where == namespace(base), (name, words)
            for kind, called in re.findall(r"\b(deployment|statefulset|service)[/ ](\S+)", " ".join(rest)):
                assert base.named(kinds[kind], called), (name, words)
            seen.add(rest[0])
            if rest[0] == "port-forward":
                assert set(rest[2:]) <= set(ports(base).values()), (name, words)
                assert rest[2] == ports(base)["grpc"]
    assert seen == {"apply", "create", "delete", "describe", "exec", "get", "logs", "port-forward", "rollout"}


def test_images_that_are_built_are_those_that_pods_have(base: Rendered) -> None:
    readme = TEXTS["README.md"]
    (default,) = re.findall(r"^ARG VARIANT=(\w+)", (DEPLOY / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    built = {
        variant or default: image for image, variant in re.findall(r" -t (\S+)(?: --build-arg VARIANT=(\w+))?", readme)
    }
    assert built == {"cpu": base.container["image"], "cuda": combine("gpu").container["image"]}
    assert re.findall(r"kind load docker-image (\S+)", readme) == [base.container["image"]]
    assert re.findall(r"`docker run .* (\S+)`", TEXTS["deploy/README.md"]) == [base.container["image"]]
    for name, variant in (("compose.yaml", "cpu"), ("compose.gpu.yaml", "cuda")):
        compose = yaml.safe_load((DEPLOY / name).read_text("utf-8"))
        assert compose["services"]["attnserve"]["image"] == built[variant]


def dialled() -> list[tuple[str, str, str, str]]:
    """The document, the scheme, the host and the port of every address in a cluster that somebody is told to dial; a
    word alone stands for a host of the reader's.
    """
    files = {**TEXTS, "services.yaml": (DEPLOY / "base" / "services.yaml").read_text("utf-8")}
    found = [
        (name, *address)
        for name, text in files.items()
        for address in re.findall(r"(dns:///|(?<![\w./-]))([a-z][\w-]*(?:\.[\w-]+)*):(\d{4,5})\b", text)
    ]
    return [each for each in found if (each[1] or "." in each[2]) and "example" not in each[2].split(".")]


def test_names_that_callers_dial_are_services(base: Rendered) -> None:
    services = {service["metadata"]["name"]: service["spec"] for service in base.of_kind("Service")}
    balanced = {f"{name}.{namespace(base)}" for name, spec in services.items() if spec.get("clusterIP") == "None"}
    assert balanced == {"attnserve-headless.attnserve"}
    found = dialled()
    assert {name for name, scheme, *_ in found if scheme} >= {
        *("README.md", "deploy/README.md", "docs/operations.md", "docs/replicas.md", "services.yaml")
    }
    assert {name for name, scheme, *_ in found if not scheme} == {"deploy/README.md", "services.yaml"}
    for name, scheme, host, port in found:
        if scheme:
            assert host in balanced, name
        else:
            service, _, where = host.partition(".")
            assert where == namespace(base), name
            assert services[service].get("clusterIP") != "None", name
        assert port == ports(base)["grpc"], name
    (told,) = re.findall(r"In Kubernetes: `([^`]+)`", TEXTS["docs/troubleshooting.md"])
    assert told in balanced


def test_labels_of_callers_are_those_that_are_let_in(base: Rendered) -> None:
    (label,) = (f"{name}={value}" for name, value in doors(base)["grpc"].items())
    network = (DEPLOY / "base" / "network.yaml").read_text("utf-8")
    told = {
        name: re.findall(r"kubectl label namespace \S+ ([^\s`]+)", text)
        for name, text in {**TEXTS, "network.yaml": network}.items()
    }
    told["deploy/README.md"] += re.findall(r"need the label\s+`([^`]+)`", TEXTS["deploy/README.md"])
    assert {name for name, labels in told.items() if labels} == {
        *("README.md", "deploy/README.md", "docs/troubleshooting.md", "network.yaml")
    }
    assert {each for labels in told.values() for each in labels} == {label}


def test_prometheus_is_where_it_is_let_in_from(base: Rendered) -> None:
    (where,) = re.findall(r"Prometheus is admitted from the\s+namespace `([\w-]+)`", TEXTS["deploy/README.md"])
    assert doors(base)["http"] == {"kubernetes.io/metadata.name": where}
    # KEDA asks the Prometheus of that namespace.
    (scaled,) = combine("autoscaling-keda").of_kind("ScaledObject")
    hosts = {re.sub(r"^http://|:\d+$", "", each["metadata"]["serverAddress"]) for each in scaled["spec"]["triggers"]}
    assert {host.split(".")[1] for host in hosts} == {where}


def test_ports_of_commands_are_those_of_pods(base: Rendered) -> None:
    grpc, http = ports(base)["grpc"], ports(base)["http"]
    text = "\n".join(TEXTS.values())
    for pattern, port in (
        (rf"attnserve top {HTTP_HOST}:(\d+)", http),
        (rf"http://{HTTP_HOST}:(\d+)/metrics", http),
        (rf"attnserve (?:info|health|caches) {HTTP_HOST}:(\d+)", grpc),
        (rf"docker run .*--publish {HTTP_HOST}:(\d+:\d+)", f"{grpc}:{grpc}"),
        (r"ATTNSERVE_LISTEN=\S+?:(\d+)`", grpc),
        (r"ATTNSERVE_HTTP_LISTEN=\S+?:(\d+)`", http),
        (r"`\[\$\(POD_IP\)\]:(\d+)`", grpc),
    ):
        assert set(re.findall(pattern, text)) == {port}, pattern


def test_commands_with_tls_name_the_files_and_the_name_that_a_pod_has() -> None:
    rendered = combine("tls")
    text = TEXTS["docs/operations.md"]
    within = set(re.findall(r"--ca (/\S+)", text))
    assert within == {rendered.config.tls_client_ca}
    names = set(re.findall(r"--server-name ([\w.-]+)", text))
    assert names
    assert names <= set(rendered.named("Certificate", "attnserve")["spec"]["dnsNames"])


def test_a_setting_of_a_component_can_be_patched_as_the_guide_says() -> None:
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", TEXTS["deploy/README.md"], re.DOTALL))
    (patches,) = (block for block in blocks if "patches" in block)
    found: dict[str, Any] = combine("gpu", more=patches).environment
    assert found["ATTNSERVE_CACHE_BYTES"] == "40GiB" != combine("gpu").environment["ATTNSERVE_CACHE_BYTES"]


def test_traces_leave_a_pod_as_the_page_about_them_says() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXTS["docs/tracing.md"], re.DOTALL)
    for names in ((), ("stateful", "tls")):
        rendered = combine(*names, more=yaml.safe_load(block))
        endpoint = re.fullmatch(r"http://\w+\.(\w+):(\d+)", rendered.config.tracing_endpoint)
        assert endpoint is not None
        (policy,) = rendered.of_kind("NetworkPolicy")
        assert fault(json.dumps(policy)) is None
        assert "Egress" in policy["spec"]["policyTypes"]
        lookups, collector = policy["spec"]["egress"]
        assert {(port["port"], port["protocol"]) for port in lookups["ports"]} == {(53, "UDP"), (53, "TCP")}
        (peer,) = collector["to"]
        assert peer == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": endpoint[1]}}}
        assert collector["ports"] == [{"port": int(endpoint[2]), "protocol": "TCP"}]
        assert policy["spec"]["ingress"] == combine(*names).of_kind("NetworkPolicy")[0]["spec"]["ingress"]
