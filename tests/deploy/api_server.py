"""Kubernetes' own API server on loopback: etcd and kube-apiserver, and the controllers and scheduler if present.

In: programs, from the directory that `KUBEBUILDER_ASSETS` names, else from the search path. Out: kubectl, configured
for that server. There are no nodes, and no pod ever runs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from manifests import Manifest

PATIENCE_S = 120.0
PROGRAMS = ("etcd", "kube-apiserver")
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
TOKEN = "of-this-test"
LOOPBACK = "127.0.0.1"


def program(name: str) -> str | None:
    """The path of one of Kubernetes' programs, if it is installed."""
    return shutil.which(name, path=os.environ.get("KUBEBUILDER_ASSETS")) or shutil.which(name)


needs_api_server = pytest.mark.skipif(
    not all(map(program, PROGRAMS)), reason=f"{' and '.join(PROGRAMS)} are not here (KUBEBUILDER_ASSETS)"
)


class ApiServer:
    """An empty API server, until the block ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []
        self._kubeconfig = directory / "kubeconfig"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        client, peer, secure = _free_ports(3)
        etcd = f"http://{LOOPBACK}:{client}"
        self._run(
            "etcd",
            f"--data-dir={self._directory / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://{LOOPBACK}:{peer}",
            # None of its data needs to outlive the test.
            "--unsafe-no-fsync",
        )
        key = self._directory / "accounts.pem"
        key.write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        tokens = self._directory / "tokens.csv"
        tokens.write_text(f"{TOKEN},admin,admin,system:masters\n")
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--bind-address={LOOPBACK}",
            f"--advertise-address={LOOPBACK}",
            f"--secure-port={secure}",
            f"--cert-dir={self._directory / 'certificates'}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
        )
        self._kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    # Its certificate is self-signed, and it is on this machine.
                    "clusters": [
                        {
                            "name": "test",
                            "cluster": {"server": f"https://{LOOPBACK}:{secure}", "insecure-skip-tls-verify": True},
                        }
                    ],
                    "users": [{"name": "test", "user": {"token": TOKEN}}],
                }
            )
        )
        self.wait_for(lambda: self._kubectl("get", "--raw", "/readyz").returncode == 0, "the API server to be ready")
        for name in filter(program, CONTROLLERS):
            self._run(
                name,
                f"--kubeconfig={self._kubeconfig}",
                f"--authentication-kubeconfig={self._kubeconfig}",
                f"--authorization-kubeconfig={self._kubeconfig}",
                f"--bind-address={LOOPBACK}",
                f"--secure-port={_free_ports(1)[0]}",
                "--leader-elect=false",
            )

    def _run(self, name: str, *flags: str) -> None:
        path = program(name)
        assert path is not None
        with (self._directory / f"{name}.log").open("wb") as log:
            self._running.append(subprocess.Popen([path, *flags], stdout=log, stderr=log, cwd=self._directory))

    def _end(self) -> None:
        for process in reversed(self._running):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_for(self, there: Callable[[], object], what: str) -> None:
        """Polls until a condition holds. Fails with the logs if that takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            ended = [process.args for process in self._running if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in self._directory.glob("*.log"))
                pytest.fail(f"waited for {what}; ended: {ended}\n{logs}")
            time.sleep(0.2)

    def version(self) -> tuple[int, int]:
        """The server's version, such as (1, 30)."""
        found = json.loads(self.kubectl("get", "--raw", "/version"))
        return int(found["major"]), int(found["minor"].rstrip("+"))

    def apply(self, manifests: Iterable[Manifest], *flags: str) -> str:
        """Applies manifests server-side. Returns kubectl's stderr: warnings, including the server's."""
        text = yaml.safe_dump_all(manifests)
        done = self._kubectl("apply", "--server-side", *flags, "--filename=-", given=text)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def refusal(self, manifest: Manifest) -> str:
        """The reason for which the server rejects a manifest."""
        done = self._kubectl("apply", "--server-side", "--dry-run=server", "--filename=-", given=json.dumps(manifest))
        assert done.returncode != 0, done.stdout
        return done.stderr

    def kept(self, manifests: Iterable[Manifest]) -> list[Any]:
        """The server's copies of manifests, in the same versions and order."""
        done = self._kubectl("get", "--filename=-", "--output=json", given=yaml.safe_dump_all(manifests))
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout)["items"]
        return found

    def get(self, kind: str, *flags: str) -> Any:
        """The objects of a kind, as data."""
        return json.loads(self.kubectl("get", kind, "--output=json", *flags))

    def kubectl(self, *arguments: str) -> str:
        """The output of kubectl, which must succeed."""
        done = self._kubectl(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _kubectl(self, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [
            "kubectl", f"--kubeconfig={self._kubeconfig}", f"--cache-dir={self._directory / 'cache'}", *arguments
        ]  # fmt: skip
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
