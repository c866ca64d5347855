"""The callers file, the tokens in it and the command that makes them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from math import log2
from pathlib import Path

import pytest

from attnserve_server.__main__ import main
from attnserve_server.access import tokens
from attnserve_server.access.callers import ALL_ROLES, MAX_NAME, Caller, anybody
from attnserve_server.access.grants import Grants, GrantsError, GrantsFile, parse
from attnserve_server.errors import PermissionDenied
from attnserve_server.settings.config import Config
from attnserve_server.start_errors import ConfigError

HASH = "sha256:" + 64 * "a"


def test_who_has_which_token() -> None:
    first, second, third = (tokens.new_token() for _ in range(3))
    text = ""
    for name, roles, token in (
        ("ann", '"use"', first),
        ("ann", '"use", "layers"', second),
        ("bob", '"metrics"', third),
    ):
        text += f'[[tokens]]\nname = "{name}"\nroles = [{roles}]\nhash = "{tokens.format_hash(tokens.digest(token))}"\n'
    grants = parse(text)
    assert grants.of_token(first) == Caller("ann", frozenset({"use"}), "ann")
    assert grants.of_token(second) == Caller("ann", frozenset({"use", "layers"}), "ann")
    assert grants.of_token(third) == Caller("bob", frozenset({"metrics"}), "bob")
    for nobodys in ("", "x", first[:-1], tokens.new_token(), "\udc80 \x00"):
        assert grants.of_token(nobodys) is None
    assert "sha256" not in repr(grants)
    assert all(each not in repr(grants) for each in (tokens.digest(first).hex(), repr(tokens.digest(first))))


def test_the_whole_hash_is_compared() -> None:
    """A token whose hash merely starts like another's does not match it."""
    token = tokens.new_token()
    found = tokens.digest(token)
    like = found[:-1] + bytes([found[-1] ^ 1])
    ann = Caller("ann", ALL_ROLES, "ann")
    assert Grants({found[:8]: (like, ann)}, {}).of_token(token) is None
    assert Grants({found[:8]: (found, ann)}, {}).of_token(token) is ann


def test_who_has_which_certificate() -> None:
    grants = parse('[[certificates]]\nname = "spiffe://x/ann"\nroles = ["use"]\n')
    assert grants.of_certificate(["other", "spiffe://x/ann"]) == Caller(
        "spiffe://x/ann", frozenset({"use"}), "spiffe://x/ann"
    )
    assert grants.of_certificate(["spiffe://x/an", "SPIFFE://X/ANN"]) is None


def test_a_certificate_with_several_known_names_is_that_of_the_first_of_them() -> None:
    grants = parse("".join(f'[[certificates]]\nname = "{name}"\nroles = ["use"]\n' for name in ("ann", "bob")))
    for names, first in ((["other", "bob", "ann"], "bob"), (["ann", "bob"], "ann")):
        caller = grants.of_certificate(names)
        assert caller is not None
        assert caller.name == first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found neither"),
        ("[[tokens]", "Expected"),
        ("[[users]]", "found 'users'"),
        ("tokens = 3", "tokens: expected a list of tables"),
        ("tokens = [3]", "tokens[0]: expected a table of hash, name, roles"),
        ('[[tokens]]\nname = "a"\nroles = ["use"]', "tokens[0]: expected a table of hash, name, roles"),
        (f'[[tokens]]\nname = "a"\nroles = ["use"]\nhash = "{HASH}"\nextra = 1', "tokens[0]: expected a table"),
        (f'[[tokens]]\nname = ""\nroles = ["use"]\nhash = "{HASH}"', "tokens[0].name: expected 1 to 256 printable"),
        (
            f'[[tokens]]\nname = "{"n" * (MAX_NAME + 1)}"\nroles = ["use"]\nhash = "{HASH}"',
            "tokens[0].name: expected 1 to 256 printable",
        ),
        (f'[[tokens]]\nname = "a\\nb"\nroles = ["use"]\nhash = "{HASH}"', "tokens[0].name: expected"),
        (f'[[tokens]]\nname = 3\nroles = ["use"]\nhash = "{HASH}"', "tokens[0].name: expected"),
        (
            f'[[tokens]]\nname = "a"\nroles = []\nhash = "{HASH}"',
            "tokens[0].roles: expected some of use, layers, metrics",
        ),
        (f'[[tokens]]\nname = "a"\nroles = ["root"]\nhash = "{HASH}"', "tokens[0].roles: expected"),
        (f'[[tokens]]\nname = "a"\nroles = [["use"]]\nhash = "{HASH}"', "tokens[0].roles: expected"),
        (f'[[tokens]]\nname = "a"\nroles = "use"\nhash = "{HASH}"', "tokens[0].roles: expected"),
        (2 * f'[[tokens]]\nname = "a"\nroles = ["use"]\nhash = "{HASH}"\n', "tokens[1].hash: another token has it"),
        (2 * '[[certificates]]\nname = "a"\nroles = ["use"]\n', "certificates[1].name: another certificate has it"),
    ],
)
def test_a_file_that_is_not_in_order(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "callers.toml"
    file.write_text(text)
    with pytest.raises(GrantsError) as caught:
        GrantsFile(file, certificates=True)
    assert str(caught.value).startswith(f"callers: {file}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "secret",
    [tokens.new_token(), HASH[:-1], 64 * "a", "md5:" + 64 * "a", "sha256:" + 64 * "g"],
    ids=["the token itself", "a digit short", "digits of whatever hash", "another hash", "not a hash"],
)
def test_a_token_in_the_place_of_its_hash_is_not_shown(secret: str, tmp_path: Path) -> None:
    file = tmp_path / "callers.toml"
    file.write_text(f'[[tokens]]\nname = "a"\nroles = ["use"]\nhash = "{secret}"')
    with pytest.raises(GrantsError, match=r"tokens\[0\].hash: expected sha256: and 64") as caught:
        GrantsFile(file, certificates=True)
    assert secret not in str(caught.value)


def test_certificates_that_nobody_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "callers.toml"
    file.write_text('[[certificates]]\nname = "ann"\nroles = ["use"]\n')
    GrantsFile(file, certificates=True)
    with pytest.raises(GrantsError, match="certificates: nobody is asked for one; expected tls_client_ca"):
        GrantsFile(file, certificates=False)


def test_a_server_that_asks_for_no_certificates_does_not_grant_them_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "callers.toml"
    file.write_text('[[certificates]]\nname = "ann"\nroles = ["use"]\n')
    flags = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--device", "cpu", "--cache-bytes", "1MiB"]
    assert main([*flags, "--callers", str(file)]) == 2
    assert "certificates: nobody is asked for one" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GrantsError, match="No such file"):
        GrantsFile(tmp_path / "none", certificates=True)


def test_the_command_makes_an_entry_and_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, file = tmp_path / "secret", tmp_path / "callers.toml"
    assert main(["token", "ann", "--roles", "use,metrics", "--out", str(secret)]) == 0
    entries, errors = capsys.readouterr()
    token = secret.read_text().strip()
    assert len(token.removeprefix(tokens.PREFIX)) * log2(64) >= 256, "it cannot be guessed"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert token not in entries + errors
    assert main(["token", "bob"]) == 0
    more, shown = capsys.readouterr()
    file.write_text(entries + more)  # as `>>` does
    grants = GrantsFile(file, certificates=True).current
    assert grants.of_token(token) == Caller("ann", frozenset({"use", "metrics"}), "ann")
    assert grants.of_token(shown.strip()) == Caller("bob", frozenset({"use"}), "bob")
    assert shown.strip() not in more
    assert main(["token", "ann", "--out", str(secret)]) == 1
    assert secret.read_text().strip() == token
    assert capsys.readouterr() == ("", f"attnserve-server: {secret}: File exists\n")


def test_the_command_takes_the_longest_name(capsys: pytest.CaptureFixture[str]) -> None:
    name = "n" * MAX_NAME
    assert main(["token", name]) == 0
    entry, token = capsys.readouterr()
    assert parse(entry).of_token(token.strip()) == Caller(name, frozenset({"use"}), name)


@pytest.mark.parametrize(
    "argv",
    [
        ["token"],
        ["token", ""],
        ["token", "n" * (MAX_NAME + 1)],
        ["token", 'a"b'],
        ["token", "a\\b"],
        ["token", "a\nb"],
        ["token", "a", "--roles", "root"],
    ],
)
def test_the_command_refuses_what_the_file_could_not_hold(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_token_whose_entry_cannot_be_written_is_not_left_behind(tmp_path: Path) -> None:
    secret = tmp_path / "ann.token"
    command = [sys.executable, "-m", "attnserve_server", "token", "ann", "--out", str(secret)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    line = "attnserve-server: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert not secret.exists()


def test_roles() -> None:
    Caller("a", frozenset({"use"}), "a").require("layers", "use")
    anybody("somewhere").require("layers")
    with pytest.raises(PermissionDenied, match="the role layers or metrics") as caught:
        Caller("a", frozenset({"use"}), "a").require("layers", "metrics")
    assert caught.value.reason == "ROLE_MISSING"


@pytest.mark.parametrize("listen", ["0.0.0.0:8001", "[::]:8001", "192.0.2.1:0", "example.org:1", "[2001:db8::1]:1"])
def test_a_server_for_other_machines_must_be_told_whom_it_is_for(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen: expected loopback or a unix socket, because"):
        Config(listen=listen)
    for given in ({"insecure": True}, {"callers": "f"}, {"tls_certificate": "c", "tls_key": "k"}):
        assert not Config(listen=listen, **given).is_local


@pytest.mark.parametrize("listen", ["0.0.0.0:8002", "[::]:8002", "192.0.2.1:0", "example.org:1"])
def test_metrics_for_other_machines_must_have_readers(listen: str) -> None:
    tls = {"tls_certificate": "c", "tls_key": "k"}
    for given in ({}, tls, tls | {"tls_client_ca": "a"}):
        expected = r"^http_listen: expected loopback, because none of http_tls, callers and insecure is given, found"
        with pytest.raises(ConfigError, match=expected):
            Config(http_listen=listen, **given)
    for given in ({"insecure": True}, {"callers": "f"}, tls | {"http_tls": True}):
        assert not Config(http_listen=listen, **given).is_http_local  # type: ignore[arg-type]


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "localhost:1", "unix:/tmp/s", "unix:///s"])
def test_a_server_for_this_machine_need_not(listen: str) -> None:
    assert Config(listen=listen).is_local


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_certificate": "c"}, "tls_key"),
        ({"tls_key": "k"}, "tls_certificate"),
        ({"tls_client_ca": "a"}, "tls_certificate"),
        ({"http_tls": True}, "tls_certificate"),
    ],
)
def test_tls_that_is_not_complete_is_refused(given: dict[str, object], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing}: expected a file"):
        Config(**given)  # type: ignore[arg-type]
