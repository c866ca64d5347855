"""Pods as rendered, with any components: their permissions, probes, resources and shutdown.

The manifests are checked against the server: its settings, its ports, the answers of a running one.
"""

from __future__ import annotations

import copy
import urllib.request
from typing import Any

import grpc
import pytest
from conftest import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from manifests import (
    COPIES,
    DEPLOY,
    LAYER_BYTES,
    POD,
    PROCESS_BYTES,
    Rendered,
    combinations,
    combine,
    load,
    needs_kubectl,
    render,
)

from attnserve_server.settings.config import Config
from attnserve_server.settings.units import parse_address, parse_size

pytestmark = needs_kubectl

CLOSING_S = 10
"""Time that the server may take to close after its drain: a second for streams, the rest for Python to exit."""


@pytest.fixture(params=[pytest.param(names, id="+".join(names) or "base") for names in combinations()])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """The base with every combination of components, one after another."""
    return combine(*request.param)


def test_pods_pass_the_restricted_standard(rendered: Rendered) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, all of its rules, baseline's first."""
    (namespace,) = rendered.of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"

    pod, container = rendered.pod, rendered.container
    assert "initContainers" not in pod
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys()
    assert not any("hostPort" in port for port in container["ports"])
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert {kind for volume in pod["volumes"] for kind in volume if kind != "name"} <= allowed
    # An exact comparison: the security contexts contain nothing that is not listed here.
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for hook in (*container.get("lifecycle", {}).values(), *(container[f"{probe}Probe"] for probe in PROBES)):
        assert "host" not in hook.get("httpGet", {})
        assert "host" not in hook.get("tcpSocket", {})


def test_pods_have_no_token(rendered: Rendered) -> None:
    assert rendered.pod["automountServiceAccountToken"] is False
    assert rendered.named("ServiceAccount", rendered.pod["serviceAccountName"])["automountServiceAccountToken"] is False


def test_pods_may_leave_a_node_that_is_to_go(rendered: Rendered) -> None:
    """By default a cluster autoscaler lets no pod with local volumes leave, except those that it is told of."""
    annotations = rendered.workload["spec"]["template"]["metadata"]["annotations"]
    told = annotations["cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"].split(",")
    assert {volume["name"] for volume in rendered.pod["volumes"] if "emptyDir" in volume} <= set(told)


def test_why_a_pod_ended_is_where_one_looks(rendered: Rendered) -> None:
    """The root file system is read-only, so what the server says last is only in its log."""
    assert rendered.container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert "terminationMessagePath" not in rendered.container


def test_the_server_understands_its_settings(rendered: Rendered) -> None:
    config = rendered.config
    ports = {port["name"]: port["containerPort"] for port in rendered.container["ports"]}
    grpc_address, http_address = parse_address(config.listen), parse_address(config.http_listen)
    assert {"grpc": grpc_address.port, "http": http_address.port} == ports
    assert grpc_address.host == http_address.host == "0.0.0.0"  # the pod's address is unknown beforehand
    assert not rendered.container.keys() & {"command", "args"}  # settings have a single place
    # A Service named attnserve would otherwise set variables like ATTNSERVE_PORT.
    assert rendered.pod["enableServiceLinks"] is False


def test_only_callers_who_are_known_may_load_layers(rendered: Rendered) -> None:
    assert rendered.config.layer_administration is bool(rendered.config.tls_client_ca)


@pytest.mark.parametrize(("overlay", "may"), [("layers", False), ("tokens", True)])
def test_who_may_load_layers_is_as_overlays_say(overlay: str, may: bool) -> None:
    environment = render(DEPLOY / "overlays" / overlay).environment
    assert load(environment).layer_administration is may
    assert load(environment | {"ATTNSERVE_LAYER_ADMINISTRATION": "true"}).layer_administration


def test_a_setting_that_the_server_does_not_have_is_found() -> None:
    with pytest.raises(AssertionError, match="ATTNSERVE_DRIAN_DELAY"):
        load(combine().environment | {"ATTNSERVE_DRIAN_DELAY": "5s"})


def test_ending_adds_up(rendered: Rendered) -> None:
    config = rendered.config
    before = rendered.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before > 0
    # kube-proxies learn within seconds that a terminating pod's endpoint is leaving.
    assert before + config.drain_delay >= 5
    most = before + config.drain_delay + config.drain_grace + CLOSING_S
    assert most <= rendered.pod["terminationGracePeriodSeconds"]
    # The server's defaults fit, too.
    assert (
        before + Config().drain_delay + Config().drain_grace + CLOSING_S
        <= rendered.pod["terminationGracePeriodSeconds"]
    )
    # What is hung gets SIGTERM, but is not waited for.
    hung = rendered.container["livenessProbe"]["terminationGracePeriodSeconds"]
    assert before < hung < rendered.pod["terminationGracePeriodSeconds"]


PROBES = ("startup", "liveness", "readiness")


def test_probes_are_three_questions(rendered: Rendered) -> None:
    startup, liveness, readiness = (rendered.container[f"{probe}Probe"] for probe in PROBES)
    patience = {
        probe: spec["periodSeconds"] * spec["failureThreshold"]
        for probe, spec in zip(PROBES, (startup, liveness, readiness), strict=True)
    }
    # Loading weights takes longer than a node stays busy, and that is longer than callers should wait for replies.
    assert patience["startup"] >= 300 > 60 >= patience["liveness"] > patience["readiness"]
    assert question(startup) == question(readiness)
    assert question(liveness) != question(readiness)


def question(probe: dict[str, Any]) -> tuple[str, str]:
    """A probe's protocol, and what it asks for."""
    if "grpc" in probe:
        return "grpc", probe["grpc"]["service"]
    return "http", probe["httpGet"]["path"]


def test_a_server_answers_the_probes(server: Server) -> None:
    """For the probes of every rendering. Answers while draining or failing are covered by the tests of health."""
    questions = {
        (probe, question(combine(*names).container[f"{probe}Probe"])) for names in combinations() for probe in PROBES
    }
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for probe, (protocol, what) in questions:
            if protocol == "grpc":
                reply = health.Check(health_pb2.HealthCheckRequest(service=what), timeout=30)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                assert what == ("liveness" if probe == "liveness" else "readiness")
            else:
                with urllib.request.urlopen(f"http://{server.http_address}{what}", timeout=30) as reply:
                    assert reply.status == 200
                assert what == ("/healthz" if probe == "liveness" else "/readyz")


def test_probes_ask_ports_that_are_there(rendered: Rendered) -> None:
    ports = {port["name"]: port["containerPort"] for port in rendered.container["ports"]}
    for probe in PROBES:
        spec = rendered.container[f"{probe}Probe"]
        if "grpc" in spec:
            # The kubelet's gRPC probes support neither TLS nor named ports.
            assert spec["grpc"]["port"] == ports["grpc"]
        else:
            assert spec["httpGet"]["port"] == "http"


def test_memory_holds_what_the_settings_allow(rendered: Rendered) -> None:
    config, resources = rendered.config, rendered.container["resources"]
    limit = parse_size(resources["limits"]["memory"] + "B")
    in_memory = sum(
        parse_size(volume["emptyDir"]["sizeLimit"] + "B")
        for volume in rendered.pod["volumes"]
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    )
    caches = config.cache_bytes  # on a GPU they are in its memory, so 0 here
    assert caches or config.device == "cuda"
    tables = config.max_caches * config.max_cache_layers * LAYER_BYTES
    assert limit >= PROCESS_BYTES + caches + tables + COPIES * config.max_bytes + in_memory
    # Several of the largest messages may arrive at once; those beyond the limit are rejected.
    assert config.max_bytes >= 8 * config.max_message_bytes
    # A server that relies on memory beyond its request gets killed when others need that memory.
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_threads_follow_the_limit_of_processors(rendered: Rendered) -> None:
    resources = rendered.container["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"]
    assert int(resources["limits"]["cpu"]) >= 2  # an integer: a fraction of a CPU gives no thread (see `host.cpus`)
    assert rendered.config.threads == 0
    assert not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & rendered.environment.keys()


def test_a_gpu_is_asked_for_where_there_is_to_be_one(rendered: Rendered) -> None:
    wanted = rendered.container["resources"]["limits"].get("nvidia.com/gpu")
    gpu = rendered.config.device == "cuda"
    assert (wanted == "1") is gpu
    assert rendered.container["image"].endswith("-cuda" if gpu else "-cpu")
    assert any(toleration["key"] == "nvidia.com/gpu" for toleration in rendered.pod.get("tolerations", ())) is gpu
    assert any(mount["mountPath"] == "/dev/shm" for mount in rendered.container["volumeMounts"]) is gpu
    assert ("nodeSelector" in rendered.pod) is gpu


def test_only_callers_and_the_monitoring_are_let_in(rendered: Rendered) -> None:
    """Their labels are those of the documents: test_instructions.py."""
    (policy,) = rendered.of_kind("NetworkPolicy")
    assert sorted(policy["spec"]["policyTypes"]) == ["Egress", "Ingress"]
    assert not policy["spec"].get("egress")
    callers, monitoring = policy["spec"]["ingress"]
    # Exactly these: another or an empty selector would let in more, and so would a rule without ports.
    for rule, port, label in (
        (callers, "grpc", "attnserve-callers"),
        (monitoring, "http", "kubernetes.io/metadata.name"),
    ):
        (value,) = rule["from"][0]["namespaceSelector"]["matchLabels"].values()
        assert value
        assert rule == {"from": [{"namespaceSelector": {"matchLabels": {label: value}}}], "ports": [{"port": port}]}


def test_disruptions_leave_all_but_one(rendered: Rendered) -> None:
    (budget,) = rendered.of_kind("PodDisruptionBudget")
    assert budget["spec"] == {
        "maxUnavailable": 1,  # a share would be more with more replicas
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # those that are not ready hold up no node
        "selector": {"matchLabels": rendered.workload["spec"]["selector"]["matchLabels"]},
    }
    # An upgrade of a Deployment replaces what it takes; a StatefulSet's goes one by one, as its strategy has no number.
    if rendered.workload["kind"] == "Deployment":
        assert rendered.workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    else:
        assert rendered.workload["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


def test_services_are_for_both_ways_of_balancing(rendered: Rendered) -> None:
    headless, cluster = (rendered.named("Service", name)["spec"] for name in ("attnserve-headless", "attnserve"))
    assert headless["clusterIP"] == "None"
    assert not headless.get("publishNotReadyAddresses")
    assert cluster["type"] == "ClusterIP"
    assert "clusterIP" not in cluster
    # For meshes and gateways, which balance single calls if they know that the port is HTTP/2 and can read it.
    tls = bool(rendered.config.tls_certificate)
    assert [port["appProtocol"] for port in cluster["ports"]] == ["https" if tls else "kubernetes.io/h2c"]


def test_an_upgrade_leaves_replicas_spread(rendered: Rendered) -> None:
    constraints = rendered.pod["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in constraints] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    strategy = rendered.workload["spec"].get("strategy", {}).get("rollingUpdate", {})
    # New pods start beside old ones, which must not affect their spread. A StatefulSet's start after the old ones end.
    assert (rendered.workload["kind"] == "Deployment") == (strategy.get("maxSurge", 0) > 0)
    for constraint in constraints:
        assert constraint.get("matchLabelKeys", []) == (["pod-template-hash"] if strategy else [])


def test_replicas_keep_their_names_where_callers_come_back_to_them(rendered: Rendered) -> None:
    stateful = rendered.workload["kind"] == "StatefulSet"
    assert stateful == ("attnserve-owners" in {service["metadata"]["name"] for service in rendered.of_kind("Service")})
    if stateful:
        assert rendered.named("Service", "attnserve-owners")["spec"]["publishNotReadyAddresses"] is True


def test_replicas_say_where_they_are(rendered: Rendered) -> None:
    config = rendered.config
    if rendered.workload["kind"] == "StatefulSet":
        (namespace,) = rendered.of_kind("Namespace")
        host = ".".join((POD["metadata.name"], rendered.workload["spec"]["serviceName"], namespace["metadata"]["name"]))
    else:
        host = POD["status.podIP"]
    if config.tls_certificate:
        names = rendered.named("Certificate", "attnserve")["spec"]["dnsNames"]
        if not any(name in (host, f"*.{host.partition('.')[2]}") for name in names):
            host = ""  # callers could not verify the server
    assert config.advertise_address == (f"{host}:{parse_address(config.listen).port}" if host else "")
    # Callers find new replicas; calls in flight on an old connection may still end, as on a draining server.
    assert 60 <= config.max_connection_age <= 600


def test_components_change_nothing_else_of_the_pods() -> None:
    """A StatefulSet's pods equal the Deployment's except for their names and for which pods are spread."""
    for names in combinations():
        if "stateful" not in names:
            continue
        without = combine(*(name for name in names if name != "stateful"))
        assert nameless(combine(*names)) == nameless(without), names


def nameless(rendered: Rendered) -> dict[str, Any]:
    template: dict[str, Any] = copy.deepcopy(rendered.workload["spec"]["template"])
    template["spec"]["containers"][0].pop("env", None)
    for constraint in template["spec"]["topologySpreadConstraints"]:
        constraint.pop("matchLabelKeys", None)
    return template


def test_every_file_is_used() -> None:
    """A file that nothing refers to is not rendered, so its mistakes would go unnoticed."""
    used = {"adapter.yaml"}  # for the metrics adapter, and not for the API server
    for kustomization in DEPLOY.glob("[bco]*/**/kustomization.yaml"):
        text = kustomization.read_text()
        files = {path.name for path in kustomization.parent.iterdir() if path.is_file() and path != kustomization}
        assert all(name in text for name in files - used), (kustomization, files)
