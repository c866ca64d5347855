"""What others than this machine can do, as a server is configured: what it says of that, and what it leaves off."""

from __future__ import annotations

from typing import Any

import pytest

from attnserve_server.settings import command_line
from attnserve_server.settings.config import Config, settings
from attnserve_server.settings.openness import openness

EVERYBODY = "anybody who can reach example:8001 may use the server: callers are not identified"
EVERYBODY_LOADS = (
    "anybody who can reach example:8001 may use the server, and load and unload layers: callers are not identified"
)
CLEAR = "traffic on example:8001 is not encrypted"
METRICS = "traffic on example:8002 is not encrypted, tokens that may read the metrics included"
READERS = "anybody who can reach example:8002 may read the metrics: callers are not identified"
TLS_FILES = {"tls_certificate": "a.pem", "tls_key": "a.key"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"insecure": True}, [EVERYBODY, CLEAR, READERS]),
        ({"insecure": True, "layer_administration": True}, [EVERYBODY_LOADS, CLEAR, READERS]),
        ({"insecure": True, "http_listen": "127.0.0.1:8002"}, [EVERYBODY, CLEAR]),
        ({"callers": "c.toml"}, [CLEAR + ", tokens included", METRICS]),
        ({"callers": "c.toml", "layer_administration": True}, [CLEAR + ", tokens included", METRICS]),
        ({"callers": "c.toml", "http_listen": "127.0.0.1:8002"}, [CLEAR + ", tokens included"]),
        (TLS_FILES | {"http_tls": True}, [EVERYBODY, READERS]),
        (TLS_FILES | {"insecure": True}, [EVERYBODY, READERS]),
        (TLS_FILES | {"tls_client_ca": "ca.pem", "http_tls": True}, [READERS]),
        (TLS_FILES | {"tls_client_ca": "ca.pem", "http_listen": "[::1]:8002"}, []),
        (TLS_FILES | {"callers": "c.toml"}, [METRICS]),
        (TLS_FILES | {"callers": "c.toml", "http_tls": True}, []),
        ({"listen": "127.0.0.1:8001", "callers": "c.toml"}, [METRICS]),
        ({"listen": "unix:/run/a.sock", "insecure": True}, [READERS]),
    ],
)
def test_what_is_said_to_be_open_is(given: dict[str, Any], said: list[str]) -> None:
    addresses = {"listen": "example:8001", "http_listen": "example:8002"}
    assert list(openness(Config(**(addresses | given)))) == said


@pytest.mark.parametrize(
    ("given", "may"),
    [
        ({}, True),
        ({"listen": "[::1]:8001"}, True),
        ({"listen": "unix:/run/a.sock"}, True),
        ({"http_listen": "example:8002", "insecure": True}, True),  # nothing is loaded over HTTP
        ({"listen": "example:8001", "insecure": True}, False),
        ({"listen": "0.0.0.0:8001", "insecure": True}, False),
        ({"listen": "example:8001"} | TLS_FILES, False),  # encrypted, and open to anybody
        ({"listen": "example:8001", "tls_client_ca": "ca.pem"} | TLS_FILES, True),
        ({"listen": "example:8001", "callers": "c.toml"}, True),
    ],
)
def test_layers_are_left_alone_by_strangers_unless_it_is_said(given: dict[str, Any], may: bool) -> None:
    """The default depends on who can call, and is shown as what it is; what is said is taken, either way."""
    flags = [f"{command_line.flag(name)}={str(value).lower()}" for name, value in given.items()]
    for config in (Config(**given), command_line.load(flags, {})):
        assert config.layer_administration is may
        assert config.show("layer_administration") == str(may).lower()
        assert config.sources()["layer_administration"] == "default"
        (told,) = (each for each in config.effective() if each.name == "layer_administration")
        assert (told.value, told.source) == (str(may).lower(), "default")
    for said in (True, False):
        assert Config(**given, layer_administration=said).layer_administration is said
        text = f"--layer-administration={str(said).lower()}"
        config = command_line.load([*flags, text], {})
        assert (config.layer_administration, config.sources()["layer_administration"]) == (said, "flag")
        config = command_line.load(flags, {"ATTNSERVE_LAYER_ADMINISTRATION": str(said).lower()})
        assert (config.layer_administration, config.sources()["layer_administration"]) == (said, "environment")
    assert Config(**given, layer_administration=not may).sources()["layer_administration"] == "code"


def test_a_default_that_depends_on_others_is_explained() -> None:
    """It names them, since the table and --help have no value to show."""
    (setting,) = (item for item in settings() if item.default is None)
    assert setting.name == "layer_administration"
    first, default = setting.metadata["help"].split(" Default: ")
    assert first.endswith(".")
    assert {"`callers`", "`tls_client_ca`", "`listen`"} <= set(default.replace(",", " ").replace(")", " ").split())
