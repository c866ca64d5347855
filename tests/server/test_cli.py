"""The command line, in separate processes: settings, output at the start, and exit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import POOL, STARTUP_S
from environment import ENVIRONMENT, run_without_the_extra
from loopback import loopback

from attnserve import Client
from attnserve._commands import connection_flags
from attnserve_server import __version__
from attnserve_server.settings import command_line, kinds
from attnserve_server.settings.command_line import misspelled, misspelled_flags
from attnserve_server.settings.config import kind_of, settings

if TYPE_CHECKING:
    from tests.conftest import Models, Server

CORE = re.compile(r"[DIWEF][0-9]{4} ")
"""How log lines that gRPC's core writes by itself begin."""


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnserve_server", *argv],
        env=ENVIRONMENT | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_setting() -> None:
    done = run("--help")
    assert done.returncode == 0
    for item in settings():
        value = "[VALUE]" if kind_of(item) is kinds.TRUTH else "VALUE"
        assert f"--{item.name.replace('_', '-')} {value}" in done.stdout
    assert not re.search(r"Default:\s*(\n  --|\n\n)", done.stdout)
    assert "token" in done.stdout
    assert "Exit status: 0 if told to stop, 1 if it cannot start, 2 for" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_version() -> None:
    assert run("--version").stdout == f"attnserve {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        (
            ["--max-requests", "many"],
            {},
            "attnserve-server: --max-requests: expected a number of at least 1 and at most 1e18, found 'many'\n",
        ),
        (
            ["--max-elements", "0"],
            {},
            "attnserve-server: --max-elements: expected a number of at least 1 and at most 1e18, found '0'\n",
        ),
        (
            [],
            {"ATTNSERVE_DEVICE": "tpu"},
            "attnserve-server: ATTNSERVE_DEVICE: expected auto, cpu, cuda or cuda:N, found 'tpu'\n",
        ),
        (["--gpu"], {}, "attnserve-server: unrecognized arguments: --gpu (--help lists the flags)\n"),
        (
            ["--max-byte", "3", "--gpu", "--LAYER=a"],
            {},
            "attnserve-server: unrecognized arguments: --max-byte 3 --gpu --LAYER=a; --max-byte is no flag: "
            "--max-bytes is; --LAYER is no flag: --layers is (--help lists the flags)\n",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(argv: list[str], environ: dict[str, str], line: str) -> None:
    done = run(*argv, **environ)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize(
    ("argv", "environ", "why"),
    [
        (["--log-format", "json", "--drain-grace=abc"], {}, "--drain-grace: expected a duration"),
        ([], {"ATTNSERVE_LOG_FORMAT": "json", "ATTNSERVE_DRAIN_GRACE": "abc"}, "ATTNSERVE_DRAIN_GRACE: expected"),
        (["--gpu", "--log-format=json"], {}, "unrecognized arguments: --gpu"),
        (["--listen", "0.0.0.0:0"], {"ATTNSERVE_LOG_FORMAT": "json"}, "listen: expected loopback"),
    ],
)
def test_a_wrong_setting_is_json_for_machines(argv: list[str], environ: dict[str, str], why: str) -> None:
    done = run(*argv, **environ)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, done.stdout, line["level"]) == (2, "", "critical")
    assert line["message"].startswith(f"attnserve-server: {why}")


@pytest.mark.parametrize("given", ["xml", ""])
def test_a_wrong_log_format_is_text(given: str) -> None:
    done = run("--log-format", given, ATTNSERVE_LOG_FORMAT="json")
    expected = f"attnserve-server: --log-format: expected text or json, found {given!r}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def ends_with(line: str, status: int, *flags: str, before: str = "") -> None:
    """Asserts that a server with these flags exits before it is ready, saying only why. `before` runs first in it."""
    addresses = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--device", "cpu")
    code = f"{before}\nimport sys; from attnserve_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *addresses, *flags]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, f"attnserve-server: {line}\n")
    assert "ready: " not in done.stdout


def test_a_pool_that_there_is_no_memory_for_is_one_line_and_status_1() -> None:
    before = """
from attnserve_server.caches import opening
from attnserve_server.host import control_groups
control_groups.memory_limit = lambda: 2**30 + 2**28 + 1000
opening.resident_bytes = lambda: 2**28
"""
    line = "cache_bytes: 4GiB of memory is not available: there is 1GiB"
    ends_with(line, 1, "--cache-bytes", "4GiB", before=before)


def test_a_pool_that_the_process_may_not_have_is_one_line_and_status_1() -> None:
    before = "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30,) * 2)"
    ends_with("cache_bytes: 16GiB of memory is not available on cpu", 1, "--cache-bytes", "16GiB", before=before)


def test_a_page_that_is_more_than_the_pool_is_by_default_is_one_line_and_status_2() -> None:
    line = "cache_page_bytes: expected at most cache_bytes, by default 512MiB here, found '1GiB'"
    ends_with(line, 2, "--cache-page-bytes", "1GiB")


def test_variables_that_are_nearly_settings_are_told() -> None:
    names = ["ATTNSERVE_DEVCE", "ATTNSERVE_LISTNE", "ATTNSERVE_MAX_BYTE", "ATTNSERVE_DEVICE", "DEVCE"]
    assert list(misspelled(names)) == [
        ("ATTNSERVE_DEVCE", "ATTNSERVE_DEVICE"),
        ("ATTNSERVE_LISTNE", "ATTNSERVE_LISTEN"),
        ("ATTNSERVE_MAX_BYTE", "ATTNSERVE_MAX_BYTES"),
    ]
    done = run_without_the_extra(ATTNSERVE_DEVCE="cpu")  # exits at once
    assert "ATTNSERVE_DEVCE is no setting: ATTNSERVE_DEVICE is" in done.stderr


def test_any_two_letters_of_a_flag_that_are_exchanged_are_told() -> None:
    for item in settings():
        right = command_line.flag(item.name)
        for at in range(len("--"), len(right) - 1):
            wrong = right[:at] + right[at + 1] + right[at] + right[at + 2 :]
            if wrong != right:
                assert list(misspelled_flags([wrong, f"{wrong}=1"])) == 2 * [(wrong, right)]


def test_any_two_letters_of_a_variable_that_are_exchanged_are_warned_of() -> None:
    for item in settings():
        right = command_line.variable(item.name)
        for at in range(len(command_line.ENVIRONMENT_PREFIX), len(right) - 1):
            wrong = right[:at] + right[at + 1] + right[at] + right[at + 2 :]
            if wrong != right:
                assert list(misspelled([wrong])) == [(wrong, right)]


def test_variables_of_others_are_not_warned_of() -> None:
    sdk = [connection_flags.TOKEN_VARIABLE, *(flag["variable"] for flag in connection_flags.FLAGS.values())]
    assert {command_line.ENVIRONMENT_PREFIX + name for name in command_line._OF_THE_SDK} == set(sdk)
    kubernetes = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_8001_TCP", "PORT_8001_TCP_ADDR")
    # Services named attnserve, attnserve-http-listen and attnserve-layers: the last two are close to settings.
    services = [f"{name}_{each}" for name in ("", "_HTTP_LISTEN", "_LAYERS") for each in kubernetes]
    assert not list(misspelled([*sdk, *(f"ATTNSERVE{each}" for each in services)]))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_what_cannot_be_said_keeps_no_server_from_serving() -> None:
    """Standard output is on a full disk."""
    command = [sys.executable, "-m", "attnserve_server", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen([*command, *POOL], env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        assert "standard output cannot be written: No space left on device" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)  # whether it serves yet or not
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()


def test_without_standard_streams_it_serves_and_ends_well(tmp_path: Path) -> None:
    """As whatever starts it without a terminal may have closed them."""
    listen = f"unix:{tmp_path}/socket"
    command = [sys.executable, "-m", "attnserve_server", "--listen", listen, "--http-listen", "127.0.0.1:0", *POOL]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    with subprocess.Popen([*shell, *command], env=ENVIRONMENT) as process, Client(listen) as client:
        try:
            client.wait_until_ready(timeout=STARTUP_S)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_names_that_cannot_be_said_keep_no_server_from_serving(
    tmp_path: Path, start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "mod\u00e8les"
    models.mkdir()
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    said = start_server("--model-directory", str(models)).startup["model_directory"]
    assert said == f"{tmp_path}/mod\\xe8les (flag)"


def test_experiments_of_grpc_are_the_operators_choice(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "tcp_rcv_lowat")
    assert start_server("--cache-bytes=64MiB").startup["grpc_experiments"] == "tcp_rcv_lowat"


def test_startup_says_what_it_runs_on_and_every_setting(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS")  # which this process has from importing the server
    startup = start_server("--max-requests", "77", "--max-batch-flops=1e9", "--cache-bytes=64MiB").startup
    assert startup["attnserve"] == __version__
    assert startup["torch"][0].isdigit()
    assert int(startup["usable_cpus"]) >= 1
    assert startup["grpc_experiments"] == "-event_engine_listener"
    assert {item.name for item in settings()} <= set(startup)
    assert startup["max_requests"] == "77 (flag)"
    assert startup["max_batch_flops"] == "1e9 (flag)"
    assert startup["log_level"] == "info (default)"
    assert startup["tls_certificate"] == "none (default)"
    assert startup["computes_on"]
    assert "math" in startup["kernels"].split(", ")
    assert startup["cache_pool"] == "64MiB"
    assert startup["largest_batch"] == "1e9 FLOPs"
    assert float(startup["largest_request"].removesuffix(" FLOPs")) > 0


def test_for_machines_every_line_is_json(start_server: Callable[..., Server], models: Models) -> None:
    """On standard output and standard error, from first to last."""
    layers = str(models.directory / "layers.toml")
    server = start_server("--log-format", "json", "--max-requests", "77", "--log-level", "debug", "--layers", layers)
    facts = {fact["fact"]: fact for fact in map(json.loads, server.said)}
    assert {item.name for item in settings()} <= set(facts)
    limit = facts["max_requests"]
    assert (limit["value"], limit["source"], limit["level"]) == ("77", "flag", "info")
    assert limit["message"] == "max_requests: 77 (flag)"
    assert limit["time"].endswith("Z")
    assert (facts["ready"]["grpc"], facts["ready"]["http"]) == (server.address, server.http_address)
    assert server.stop() == 0
    assert facts["layer"]["value"].endswith(" bytes")
    of_python = [json.loads(line)["message"] for line in server.stderr().splitlines() if not CORE.match(line)]
    assert all(of_python)
    assert (of_python[-1], "draining" in of_python) == ("ended", True)
    done = run(
        "--log-format=json", "--listen", server.address, "--http-listen", "127.0.0.1:0", "--layers", "/no/file", *POOL
    )
    assert done.returncode == 1
    assert all(json.loads(line)["message"] for line in (*done.stdout.splitlines(), *done.stderr.splitlines()))
    assert json.loads(done.stderr.splitlines()[-1])["level"] == "critical"


ODD = """
import sys, threading, warnings
from attnserve_server import __main__, serving

class Odd:
    def __del__(self):
        raise ValueError("while freed")

def fail(*_):
    warnings.warn("odd", RuntimeWarning)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    Odd()
    raise ValueError("in the end")

serving.run = fail
sys.exit(__main__.main(sys.argv[1:]))
"""
"""A server with all that Python writes to standard error by itself."""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_warnings_and_uncaught_exceptions_are_log_lines(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ODD, "--log-format", log_format],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    said = (
        "RuntimeWarning: odd (<string>:10)",
        "uncaught exception in thread ",
        "xception ignored in Odd.__del__",
        "uncaught exception",
    )
    errors = ("", "ZeroDivisionError: division by zero", "ValueError: while freed", "ValueError: in the end")
    if log_format == "json":
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert [line["level"] for line in lines] == ["warning", "error", "error", "critical"]
        for line, words, error in zip(lines, said, errors, strict=True):
            assert words in line["message"]
            assert line.get("traceback", "").endswith(error)
    else:
        assert all(words in done.stderr for words in (*said, *errors))


def test_what_is_open_to_others_is_in_the_log(start_server: Callable[..., Server]) -> None:
    # It is loopback, but does not look so.
    server = start_server("--listen", "127.1:0", "--insecure")
    warnings = [line.partition(" attnserve_server.server ")[2] for line in server.stderr().splitlines()]
    assert warnings == [
        "anybody who can reach 127.1:0 may use the server: callers are not identified",
        "traffic on 127.1:0 is not encrypted",
    ]


@pytest.mark.parametrize("name", ["listen", "http_listen"])
def test_a_taken_port_is_one_line_and_status_1(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        addresses = {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"} | {name: address}
        flags = [*POOL, "--log-level", "error"]
        done = run("--listen", addresses["listen"], "--http-listen", addresses["http_listen"], *flags)
    assert done.returncode == 1
    assert "ready: " not in done.stdout
    words = f"attnserve-server: {name}: cannot listen on {address}: Address already in use"
    assert done.stderr.splitlines()[-1] == words
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", loopback())
def test_a_port_that_is_taken_on_one_address_of_a_name_is_taken(host: str) -> None:
    """Otherwise the other address would be served, and callers of the name would reach either server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        done = run("--listen", address, "--http-listen", "127.0.0.1:0", "--cache-bytes", "1MiB", "--log-level", "error")
    assert done.returncode == 1
    assert "ready: " not in done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"attnserve-server: listen: cannot listen on {address}: ")
