"""The deployment, given to Kubernetes' own API server: it accepts all of it, and its admission lets the pods in.

Where the controllers are installed too, they create the pods. Needs programs that this machine may not have: see
deploy/README.md.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from api_server import CONTROLLERS, ApiServer, needs_api_server, program
from manifests import DEPLOY, Manifest, Rendered, combinations, combine, needs_kubectl, render
from test_render import CUSTOM

pytestmark = [needs_kubectl, needs_api_server]

OLDEST = (1, 30)
NAMESPACE = "attnserve"


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with definitions of the custom resources, and the namespace."""
    with ApiServer(tmp_path_factory.mktemp("kubernetes")) as server:
        if server.version() < OLDEST:
            pytest.skip(f"Kubernetes {server.version()} is older than {OLDEST}")
        server.apply(definitions(combine(*names) for names in combinations()))
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        server.apply(combine().of_kind("Namespace"))
        server.wait_for(
            lambda: program("kube-controller-manager") is None or server.get("serviceaccounts", "-A")["items"],
            "the accounts of the namespaces",
        )
        yield server


def definitions(rendered: Iterable[Rendered]) -> list[Manifest]:
    """Definitions of the custom resources that accept any field: test_render checks against the published schemas."""
    found: dict[str, Manifest] = {}
    for manifest in (manifest for each in rendered for manifest in each.manifests):
        if (manifest["apiVersion"], manifest["kind"]) in CUSTOM:
            group, _, version = manifest["apiVersion"].partition("/")
            kind = manifest["kind"]
            plural = f"{kind.lower()}s"
            found[kind] = {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group,
                    "scope": "Namespaced",
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                    "versions": [
                        {
                            "name": version,
                            "served": True,
                            "storage": True,
                            "schema": {
                                "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                            },
                        }
                    ],
                },
            }
    return list(found.values())


def pod_of(rendered: Rendered) -> Manifest:
    """A pod as the workload's controller would create it: admission judges only pods."""
    template = copy.deepcopy(rendered.workload["spec"]["template"])
    template["metadata"] |= {"name": "attnserve-0", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", **template}


@pytest.mark.parametrize("names", [pytest.param(names, id="+".join(names) or "base") for names in combinations()])
def test_the_server_takes_every_combination(api_server: ApiServer, names: tuple[str, ...]) -> None:
    rendered = combine(*names)
    # A warning would mean a deprecation, a field without effect, or a pod that violates the restricted standard.
    assert api_server.apply(rendered.manifests, "--dry-run=server") == ""
    api_server.apply(rendered.of_kind("ServiceAccount"))
    assert api_server.apply([pod_of(rendered)], "--dry-run=server") == ""


def test_what_it_takes_it_keeps(api_server: ApiServer) -> None:
    """No field is dropped or changed."""
    directories = [DEPLOY / "base", *sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml"))]
    for directory in directories:
        manifests = render(directory).manifests
        assert api_server.apply(manifests, "--force-conflicts") == ""
        for manifest, kept in zip(manifests, api_server.kept(manifests), strict=True):
            assert list(lacking(manifest, kept, manifest["kind"])) == []


def lacking(wanted: Any, found: Any, place: str) -> Iterator[str]:
    """The places of a manifest where the server's copy differs, other than by more fields or another order."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        # Empty equals absent: a NetworkPolicy with a type but no rules for it lets nothing pass.
        for name, part in ((name, part) for name, part in wanted.items() if part not in ([], {})):
            yield from lacking(part, found.get(name), f"{place}.{name}")
    elif isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) != len(found) or any(all(any(lacking(part, o, place)) for o in found) for part in wanted):
            yield place
    elif wanted != found:
        yield place


@pytest.mark.parametrize(
    ("field", "value"),
    [("privileged", True), ("allowPrivilegeEscalation", True), ("capabilities", {"add": ["NET_RAW"]})],
)
def test_a_pod_that_asks_for_more_is_refused(api_server: ApiServer, field: str, value: object) -> None:
    pod = pod_of(combine())
    pod["spec"]["containers"][0]["securityContext"][field] = value
    api_server.apply(combine().of_kind("ServiceAccount"))
    assert 'violates PodSecurity "restricted' in api_server.refusal(pod)


@pytest.mark.skipif(not all(map(program, CONTROLLERS)), reason=f"{' and '.join(CONTROLLERS)} are not here")
@pytest.mark.parametrize("names", [(), ("stateful",)], ids=["Deployment", "StatefulSet"])
def test_its_controllers_make_the_pods(api_server: ApiServer, names: tuple[str, ...]) -> None:
    rendered = combine(*names)
    kind, replicas = rendered.workload["kind"], rendered.workload["spec"]["replicas"]
    api_server.apply(rendered.manifests, "--force-conflicts")

    def pods() -> list[Any]:
        found: list[Any] = api_server.get("pods", f"-n={NAMESPACE}")["items"]
        return [pod for pod in found if pod["metadata"]["ownerReferences"][0]["kind"] in ("ReplicaSet", kind)]

    api_server.wait_for(lambda: len(pods()) >= replicas, f"the pods of a {kind}")
    api_server.kubectl("delete", kind.lower(), "attnserve", f"-n={NAMESPACE}")
