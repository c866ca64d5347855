"""What kustomize renders from deploy/, as data: the base, an overlay, or the base with any components.

In: directories of deploy/. Out: manifests, as the API server would receive them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from attnserve_server.settings import command_line
from attnserve_server.settings.command_line import ENVIRONMENT_PREFIX, variable
from attnserve_server.settings.config import Config, settings

Manifest: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
WORKLOADS = ("Deployment", "StatefulSet")
AUTOSCALINGS = ("autoscaling", "autoscaling-keda")
"""Two mutually exclusive ways to set the number of replicas."""

PROCESS_BYTES = 300 << 20
"""Memory of a server without its cache pool, measured after start on a CPU."""
LAYER_BYTES = 130
"""What a layer of a cache takes outside the pool."""
COPIES = 3
"""The most memory seen in use by a large request as it arrives, in multiples of its size: gRPC holds it in pieces, then
it is joined, and memory freed between other blocks cannot always be reused."""

POD = {"metadata.name": "attnserve-0", "status.podIP": "10.0.0.1"}
"""What Kubernetes tells a pod about itself, and its namespace."""

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None and "REQUIRE_KUBECTL" not in os.environ,
    reason="kubectl, which renders, is not here",
)


def components() -> list[str]:
    """The names of all components."""
    return sorted(path.parent.name for path in DEPLOY.glob("components/*/kustomization.yaml"))


def combinations() -> Iterator[tuple[str, ...]]:
    """Every combination of compatible components."""
    names = components()
    for count in range(len(names) + 1):
        yield from (chosen for chosen in itertools.combinations(names, count) if not set(AUTOSCALINGS) <= set(chosen))


@dataclass(frozen=True)
class Rendered:
    """All manifests of one rendering."""

    manifests: tuple[Manifest, ...]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """The manifests of these kinds."""
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def named(self, kind: str, name: str) -> Manifest:
        """The one manifest of a kind and name."""
        (found,) = (manifest for manifest in self.of_kind(kind) if manifest["metadata"]["name"] == name)
        return found

    @property
    def workload(self) -> Manifest:
        """The single workload that creates the pods, whatever its kind."""
        (found,) = self.of_kind(*WORKLOADS)
        return found

    @property
    def pod(self) -> Manifest:
        """The pods' spec."""
        spec: Manifest = self.workload["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        """The one container of a pod."""
        (container,) = self.pod["containers"]
        return container  # type: ignore[no-any-return]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the container of `POD`: from ConfigMaps and its own variables."""
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            found |= self.named("ConfigMap", source["configMapRef"]["name"])["data"]
        for entry in self.container.get("env", []):
            if "valueFrom" in entry:
                told = POD | {"metadata.namespace": self.workload["metadata"]["namespace"]}
                found[entry["name"]] = told[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                # A reference resolves only to variables defined before it.
                found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], entry["value"])
        return found

    @property
    def config(self) -> Config:
        """The server's configuration from its environment. Raises ConfigError if the server rejects it."""
        return load(self.environment)


def load(environment: Mapping[str, str]) -> Config:
    """The server's configuration from an environment whose ATTNSERVE_ variables must all be settings."""
    known = {variable(setting.name) for setting in settings()}
    ours = {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    assert ours <= known, f"the server has no settings {sorted(ours - known)}"
    return command_line.load([], environment)


@cache
def render(directory: Path) -> Rendered:
    """What `kubectl kustomize` renders from a directory."""
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Deprecation warnings would appear here.
    assert not done.stderr, done.stderr
    return Rendered(tuple(yaml.load_all(done.stdout, yaml.CSafeLoader)))  # ten times as fast as the Python loader


def combine(*names: str, more: Mapping[str, Any] | None = None) -> Rendered:
    """The base with components, in this order, and `more` in the kustomization."""
    return _combined(names, json.dumps(more or {}))


@cache
def _combined(names: tuple[str, ...], more: str) -> Rendered:
    with tempfile.TemporaryDirectory() as directory:
        # Kustomize accepts only relative paths of directories.
        relative = os.path.relpath(DEPLOY, Path(directory).resolve())
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{relative}/base"],
            "components": [f"{relative}/components/{name}" for name in names],
            **json.loads(more),
        }
        Path(directory, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render(Path(directory))
