"""compose.yaml: valid by the Compose specification's schema, with files and settings that exist."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.parse
from importlib import resources
from typing import Any

import jsonschema
import pytest
import yaml
from conftest import Server
from manifests import DEPLOY, load

from attnserve_server.settings.units import parse_address, parse_duration

FILES = ("compose.yaml", "compose.gpu.yaml")
CLOSING_S = 10


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return parsed


@pytest.fixture(scope="module")
def gpu() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    return parsed


def variables(path: str) -> dict[str, str]:
    lines = (DEPLOY / path).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", FILES)
def test_it_is_as_the_specification_says(name: str) -> None:
    schemas = resources.files("check_jsonschema.builtin_schemas.vendor")
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validate(yaml.safe_load((DEPLOY / name).read_text()), schema)


def test_files_and_volumes_are_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in compose["volumes"], volume
        for config in service.get("configs", ()):
            assert config["source"] in compose["configs"]
        for wanted in service.get("depends_on", ()):
            assert wanted in compose["services"]
    build = compose["services"]["attnserve"]["build"]
    context = DEPLOY / build["context"]
    assert (context / "pyproject.toml").is_file()
    assert (context / build["dockerfile"]).is_file()


def test_the_server_understands_its_settings(compose: dict[str, Any], gpu: dict[str, Any]) -> None:
    environment = variables(compose["services"]["attnserve"]["env_file"])
    config = load(environment)
    published = {port.rpartition(":")[2] for port in compose["services"]["attnserve"]["ports"]}
    assert published == {str(parse_address(address).port) for address in (config.listen, config.http_listen)}
    grace = parse_duration(compose["services"]["attnserve"]["stop_grace_period"])
    assert grace >= config.drain_delay + config.drain_grace + CLOSING_S
    assert load(environment | variables(gpu["services"]["attnserve"]["env_file"])).device == "cuda"


def test_build_arguments_are_the_dockerfiles(compose: dict[str, Any], gpu: dict[str, Any]) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for parsed, variant in ((compose, "cpu"), (gpu, "cuda")):
        service = parsed["services"]["attnserve"]
        assert service["image"].endswith(f"-{variant}")
        assert service["build"]["args"]["VARIANT"] == variant
        assert f" AS {variant}\n" in dockerfile
        assert all(f"ARG {name}" in dockerfile for name in service["build"]["args"])


def test_there_is_as_much_shared_memory_as_on_kubernetes(gpu: dict[str, Any]) -> None:
    pod = yaml.safe_load((DEPLOY / "components" / "gpu" / "pod.yaml").read_text())["spec"]["template"]["spec"]
    (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["sizeLimit"] == "1Gi"
    assert gpu["services"]["attnserve"]["shm_size"] == "1gb"  # which Docker takes for 1 GiB


def test_it_is_reached_from_this_machine_only_and_may_do_little(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert compose["services"]["attnserve"]["read_only"] is True


def test_health_is_what_the_server_says(compose: dict[str, Any], server: Server) -> None:
    kind, python, option, code = compose["services"]["attnserve"]["healthcheck"]["test"]
    assert (kind, python, option) == ("CMD", "python", "-c")
    address = parse_address(load(variables("base/settings.env")).http_listen)
    assert f"http://127.0.0.1:{address.port}/readyz" in code
    for path, status in (("/readyz", 0), ("/nothing", 1)):
        there = code.replace(f"127.0.0.1:{address.port}/readyz", f"{server.http_address}{path}").replace(
            "timeout=2", "timeout=30"
        )
        done = subprocess.run([sys.executable, "-c", there], capture_output=True, check=False)
        assert done.returncode == status


def test_prometheus_and_grafana_find_each_other(compose: dict[str, Any]) -> None:
    prometheus = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yaml").read_text())
    (scraped,) = prometheus["scrape_configs"]
    (target,) = (target for config in scraped["static_configs"] for target in config["targets"])
    host, _, port = target.partition(":")
    assert host in compose["services"]
    assert int(port) == parse_address(load(variables("base/settings.env")).http_listen).port
    mounted = {
        volume.split(":")[1] for volume in compose["services"]["prometheus"]["volumes"] if volume.startswith(".")
    }
    assert {f"/etc/prometheus/{name}" for name in ("prometheus.yaml", *prometheus["rule_files"])} == mounted

    (datasource,) = yaml.safe_load(compose["configs"]["datasource"]["content"])["datasources"]
    url = urllib.parse.urlsplit(datasource["url"])
    assert url.hostname in compose["services"]
    assert compose["services"][url.hostname]["ports"][0].endswith(f":{url.port}")
    assert datasource["isDefault"] is True
    (provider,) = yaml.safe_load(compose["configs"]["dashboards"]["content"])["providers"]
    grafana = compose["services"]["grafana"]
    (dashboard,) = (volume.split(":")[1] for volume in grafana["volumes"] if "dashboard" in volume.split(":")[0])
    assert dashboard.startswith(provider["options"]["path"] + "/")
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
