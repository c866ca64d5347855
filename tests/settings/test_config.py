"""The configuration: precedence, validation, units, and the documents that show it."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.caches.store import CacheStore
from attnserve_server.host import control_groups, cpus
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.settings import command_line, units
from attnserve_server.settings.config import Config, kind_of, settings
from attnserve_server.start_errors import ConfigError, UsageError
from scripts import settings_table


def test_flag_wins_over_environment_wins_over_default() -> None:
    environ = {"ATTNSERVE_MAX_REQUESTS": "7", "ATTNSERVE_HTTP_LISTEN": "127.0.0.1:1", "UNRELATED": "x"}
    loaded = command_line.load(["--http-listen", "127.0.0.1:2"], environ)
    assert (loaded.http_listen, loaded.max_requests, loaded.max_batch_requests) == ("127.0.0.1:2", 7, 64)
    sources = loaded.sources()
    assert sources["http_listen"] == "flag"
    assert sources["max_requests"] == "environment"
    assert {name for name, source in sources.items() if source != "default"} == {"http_listen", "max_requests"}


def test_every_setting_is_a_flag_and_a_variable() -> None:
    for item in settings():
        text = Config().show(item.name)
        by_flag = command_line.load([command_line.flag(item.name), text], {})
        by_variable = command_line.load([], {command_line.variable(item.name): text})
        assert by_flag == by_variable == Config()
        assert by_flag.sources()[item.name] == "flag"
        assert by_variable.sources()[item.name] == "environment"
        assert item.metadata["help"].endswith(".")


def test_callers_are_told_every_setting_but_no_path_and_no_address() -> None:
    private = {"listen": "unix:/run/secret.sock", "http_listen": "10.1.2.3:8002", "layers": "/secret/layers.toml"}
    argv = ["--insecure", *(f"--{name.replace('_', '-')}={value}" for name, value in private.items())]
    told = {each.name: each for each in command_line.load(argv, {"ATTNSERVE_MAX_REQUESTS": "7"}).effective()}
    assert list(told) == [item.name for item in settings()]
    assert (told["max_requests"].value, told["max_requests"].source) == ("7", "environment")
    assert (told["max_bytes"].value, told["max_bytes"].source) == ("2GiB", "default")
    assert {told[name].value for name in private} == {None}
    assert told["layers"].source == "flag"
    assert told["model_directory"].value == ""


def test_names_of_flags_and_variables() -> None:
    assert command_line.flag("http_listen") == "--http-listen"
    assert command_line.variable("http_listen") == "ATTNSERVE_HTTP_LISTEN"


def test_flag_of_a_truth_value_by_itself_is_true() -> None:
    loaded = command_line.load(
        ["--insecure", "--reflection=false", "--layer-administration"], {"ATTNSERVE_INSECURE": "false"}
    )
    assert (loaded.insecure, loaded.reflection, loaded.layer_administration) == (True, False, True)
    with pytest.raises(UsageError, match="--max-requests: expected one argument"):
        command_line.load(["--max-requests"], {})


def test_values_have_their_units() -> None:
    argv = ["--max-bytes=3GiB", "--max-wait", "1500us", "--drain-grace=1m", "--max-flops=2e13", "--reflection=off"]
    argv.append("--max-elements=2e9")
    loaded = command_line.load(argv, {})
    assert loaded.max_bytes == 3 * 2**30
    assert loaded.max_wait == 0.0015
    assert loaded.drain_grace == 60.0
    assert loaded.max_flops == 20_000_000_000_000
    assert type(loaded.max_flops) is int
    assert loaded.reflection is False
    assert loaded.max_elements == 2_000_000_000
    assert (loaded.show("max_wait"), loaded.sources()["max_wait"]) == ("1500us", "flag")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("listen", "8001"),
        ("listen", "127.0.0.1:70000"),
        ("listen", "::1:8001"),
        ("listen", "unix:relative"),
        ("http_listen", "unix:/tmp/socket"),
        ("http_listen", ""),
        ("device", "tpu"),
        ("device", "cuda:"),
        ("threads", "-1"),
        ("threads", "two"),
        ("max_message_bytes", "2GiB"),  # a signed 32-bit integer in gRPC
        ("max_message_bytes", "64QiB"),
        ("max_requests", "0"),
        ("max_requests", "1.5"),
        ("max_bytes", "0.3"),
        ("max_flops", "1e999"),
        ("max_flops", "0"),
        ("max_flops", "1e19"),  # more than the 64 bits of ServerInfo hold
        ("max_caches", "1e19"),
        ("max_bytes", "16777216TiB"),
        ("max_wait", "-1s"),
        ("max_wait", "5 fortnights"),
        ("max_wait", "nan"),
        ("max_wait", "1e999s"),
        ("reflection", "perhaps"),
        ("cache_bytes", "2000000TiB"),
        ("cache_page_bytes", "4097"),
        ("cache_page_bytes", "4000"),
        ("cache_page_bytes", "2GiB"),
        ("cache_ttl", "1e12"),  # more than the Duration in a reply can hold
        ("max_connection_age", "721h"),  # gRPC counts milliseconds in 32 bits
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("listen", "$(POD_IP):8001"),
        ("listen", "[10.0.0.1]:8001"),
        ("advertise_address", "$(POD_IP):8001"),
        ("advertise_address", "${HOSTNAME}:8001"),
        ("advertise_address", "{{ .Values.host }}:8001"),
        ("advertise_address", ":8001"),
        ("advertise_address", "host"),
        ("advertise_address", "host..name:8001"),
        ("advertise_address", "fd00::1:8001"),
        ("advertise_address", "0.0.0.0:8001"),
        ("advertise_address", "[::]:8001"),
        ("advertise_address", "host:0"),
        ("advertise_address", "10.0.0.1:0"),
    ],
)
def test_a_wrong_value_is_refused_and_named(name: str, text: str) -> None:
    for spelled, argv, environ in (
        (command_line.flag(name), [f"{command_line.flag(name)}={text}"], {}),
        (command_line.variable(name), [], {command_line.variable(name): text}),
    ):
        with pytest.raises(ConfigError) as caught:
            command_line.load(argv, environ)
        message = str(caught.value)
        assert message.startswith(f"{spelled}: expected ")
        assert message.endswith(f"found {text!r}")
        assert "\n" not in message


@pytest.mark.parametrize("text", ["-1", "-1s", "-1e3", "-.5h", "-5MiB"])
def test_a_negative_value_after_its_flag_is_refused_as_one(text: str) -> None:
    for item in settings():
        if not kind_of(item).valid(text):  # as files may be called
            name = command_line.flag(item.name)
            with pytest.raises(ConfigError) as caught:
                command_line.load(["--insecure", name, text], {})
            assert str(caught.value) == f"{name}: expected {kind_of(item).expected}, found {text!r}"
    assert command_line.load(["--layers", f"{text}.toml"], {}).layers == f"{text}.toml"


def test_only_values_are_joined_to_flags() -> None:
    for argv in (["-1s"], ["--max-wait", "1s", "-1s"], ["--max-wait=1s", "-1s"], ["--max-wait", "--insecure", "-"]):
        with pytest.raises(UsageError, match="--help lists the flags"):
            command_line.load(argv, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_requests", 1.0),
        ("max_requests", True),
        ("max_requests", "64"),
        ("max_wait", float("inf")),
        ("max_wait", True),
        ("reflection", 1),
        ("listen", 8001),
        ("log_level", None),
    ],
)
def test_a_config_built_in_code_is_validated(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        Config(**{name: value})  # type: ignore[arg-type]


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_message_bytes: expected at most max_bytes \(1MiB\), found '256MiB'"):
        Config(max_bytes=2**20)
    with pytest.raises(ConfigError, match=r"^max_batch_flops: expected at most max_flops \(1e3\), found '4e9'"):
        command_line.load(["--max-flops", "1000", "--max-batch-flops", "4e9"], {})


def test_both_ports_at_one_address_are_refused() -> None:
    both = r"^http_listen: expected another port than that of listen \(127.0.0.1:9000\), found '127.0.0.1:9000'$"
    with pytest.raises(ConfigError, match=both):
        command_line.load(["--listen", "127.0.0.1:9000", "--http-listen", "127.0.0.1:9000"], {})
    assert Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0").listen == "127.0.0.1:0"


def test_a_pool_has_a_page() -> None:
    with pytest.raises(ConfigError, match=r"^cache_bytes: expected 0, or at least 4KiB, found '1'"):
        command_line.load(["--cache-bytes", "1"], {})
    with pytest.raises(ConfigError, match=r"^cache_bytes: .* cache_page_bytes \(2MiB\), found '1MiB'"):
        Config(cache_bytes=2**20, cache_page_bytes=2**21)
    assert Config(cache_bytes=4096, cache_page_bytes=4096).cache_bytes == 4096
    assert Config(cache_bytes=0, cache_page_bytes=2**21).cache_bytes == 0


def test_pages_are_aligned() -> None:
    """Every page size that can be configured is accepted by the pool."""
    for page_bytes in (4096, 4096 + CACHE_LINE, 2**30 - CACHE_LINE):
        config = Config(cache_page_bytes=page_bytes)
        store = CacheStore(page_bytes, config.cache_page_bytes, config.max_caches, config.max_cache_layers)
        assert store.pool_bytes == page_bytes


def test_built_in_code_says_so_and_cannot_be_changed() -> None:
    built = Config(max_requests=3)
    assert built.sources()["max_requests"] == "code"
    assert built.sources()["max_bytes"] == "default"
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.max_requests = 4  # type: ignore[misc]


@pytest.mark.parametrize("argv", [["--no-such-flag"], ["--max-req", "3"], ["stray"], ["--listen"]])
def test_a_wrong_command_line_is_one_line(argv: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        command_line.load(argv, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:8001", "localhost:80", "unix:/run/a.sock", "unix:///run/a"])
def test_addresses(address: str) -> None:
    assert Config(listen=address).listen == address


@pytest.mark.parametrize(
    "address",
    ["", "10.0.0.7:8001", "[fd00::7]:8001", "attnserve-0.attnserve.default.svc:8001", "a_b:1", "müller.de.:1"],
)
def test_addresses_to_be_told_to_others(address: str) -> None:
    assert Config(advertise_address=address).advertise_address == address


@given(st.integers(0, 2**62))
def test_sizes_and_counts_print_as_they_parse(value: int) -> None:
    assert units.parse_size(units.format_size(value)) == value
    assert units.parse_count(units.format_count(value)) == value


@given(st.integers(0, 2**40), st.sampled_from(["TiB", "GiB", "MiB", "KiB", ""]))
def test_whole_units_print_as_they_parse(count: int, unit: str) -> None:
    size = units.parse_size(f"{count}{unit}")
    assert units.parse_size(units.format_size(size)) == size


@given(st.floats(0, 1e9, allow_nan=False))
def test_durations_print_as_they_parse(seconds: float) -> None:
    assert units.parse_duration(units.format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("2s", 2.0), ("1m", 60.0), ("50us", 5e-5), ("1.5h", 5400.0), ("0.25", 0.25), ("0", 0.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (65536, "64KiB"), (3 * 2**29, "1536MiB"), (2**40, "1TiB"), (1000, "1000")]
)
def test_sizes_print_in_the_largest_unit(size: int, text: str) -> None:
    assert units.format_size(size) == text


@pytest.mark.parametrize(
    ("count", "text"), [(64, "64"), (4_000_000_000, "4e9"), (5 * 10**12, "5e12"), (1_234_567, "1234567"), (0, "0")]
)
def test_counts_print_short(count: int, text: str) -> None:
    assert units.format_count(count) == text


@pytest.mark.parametrize(("path", "full"), settings_table.DOCUMENTS.items())
def test_the_documents_show_the_settings_as_they_are(path: Path, full: bool) -> None:
    text = path.read_text("utf-8")
    assert text == settings_table.with_table(text, full=full), "run: make docs"


def test_the_table_has_every_setting() -> None:
    table = settings_table.markdown()
    for item in dataclasses.fields(Config):
        assert (f"`{command_line.variable(item.name)}`" in table) == (not item.name.startswith("_"))


def test_the_table_says_which_values_settings_take_as_errors_do() -> None:
    rows = [row.strip("| ").split(" | ") for row in settings_table.markdown().splitlines()]
    column = rows[0].index("values")
    values = {row[0].strip("`"): row[column] for row in rows[2:]}
    wrong = ["--max-message-calls=2", "--max-message-bytes=1", "--cache-page-bytes=3", "--max-rank=5", "--device=tpu"]
    for argument in (*wrong, "--max-connection-age=721h", "--tracing-sample=2", "--reflection=perhaps", "--listen=x"):
        with pytest.raises(ConfigError) as caught:
            command_line.load([argument], {})
        assert values[caught.value.name] == caught.value.expected
    assert "values" not in settings_table.markdown(full=False)


@pytest.mark.parametrize(
    ("given", "named", "others"),
    [
        ({"max_bytes": 2**20}, "max_message_bytes", {"max_bytes"}),
        ({"max_flops": 1, "max_batch_flops": 2}, "max_batch_flops", {"max_flops"}),
        ({"max_flops": 1, "max_request_flops": 2}, "max_request_flops", {"max_flops"}),
        ({"cache_bytes": 2**12, "cache_page_bytes": 2**13}, "cache_bytes", {"cache_page_bytes"}),
        ({"tls_certificate": "a.pem"}, "tls_key", {"tls_certificate"}),
        ({"tls_key": "a.key"}, "tls_certificate", {"tls_key"}),
        ({"tls_client_ca": "ca.pem"}, "tls_certificate", {"tls_client_ca"}),
        ({"http_tls": True}, "tls_certificate", {"http_tls"}),
        ({"listen": "127.0.0.1:1", "http_listen": "127.0.0.1:1"}, "http_listen", {"listen"}),
        ({"listen": "example:1"}, "listen", {"tls_certificate", "callers", "insecure"}),
        ({"http_listen": "example:1"}, "http_listen", {"http_tls", "callers", "insecure"}),
    ],
)
def test_what_settings_demand_of_each_other_is_in_the_documents(
    given: dict[str, Any], named: str, others: set[str]
) -> None:
    helps = {item.name: item.metadata["help"] for item in settings()}
    with pytest.raises(ConfigError) as caught:
        Config(**given)
    assert caught.value.name == named
    assert {name for name in helps if re.search(rf"\b{name}\b", caught.value.expected)} == others
    assert [name for name in others if f"`{name}`" not in helps[named] and f"`{named}`" not in helps[name]] == []


def test_both_settings_of_bytes_name_the_other() -> None:
    helps = {item.name: item.metadata["help"] for item in settings()}
    assert "at most `max_bytes`" in helps["max_message_bytes"]
    assert "at least `max_message_bytes`" in helps["max_bytes"]


def test_a_setting_that_is_one_of_some_words_says_which() -> None:
    """So --help and the document do."""
    told = {}
    for item in settings():
        kind = kind_of(item)
        words = kind.expected.split(" or ")
        if len(words) > 1 and all(map(kind.valid, words)):
            told[item.name] = [word for word in words if re.search(rf"\b{word}\b", item.metadata["help"])] == words
    assert told == {"native_kernel": True, "log_level": True, "log_format": True}


def test_a_document_without_the_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="configuration"):
        settings_table.with_table("# A page\n<!-- configuration -->\n")


def test_usable_cpus_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for quota, expected in ((None, 8), (2.5, 2), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(control_groups, "cpu_quota", lambda quota=quota: quota)
        assert cpus.usable_cpus() == expected
