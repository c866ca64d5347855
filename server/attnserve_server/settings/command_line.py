"""Reads the settings from the command line and the environment.

In: flags and environment variables. Out: a `Config`. A field `http_listen` is the flag `--http-listen` and the variable
`ATTNSERVE_HTTP_LISTEN`; a flag wins over the environment, which wins over the default.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from attnserve_server import __version__
from attnserve_server.exit_statuses import CANNOT_START, CUT_OFF, DEVICE_FAILED, WRONG_SETTING
from attnserve_server.settings import kinds
from attnserve_server.settings.config import Config, Source, kind_of, settings, shown_default
from attnserve_server.start_errors import ConfigError, UsageError

ENVIRONMENT_PREFIX: Final = "ATTNSERVE_"
_CLOSE: Final = 0.7
"""How alike a misspelling and a setting are, by difflib: two letters exchanged in a name of six are 0.83 alike."""
_OF_THE_SDK: Final = frozenset(("CA", "CLIENT_CERTIFICATE", "CLIENT_KEY", "SERVER_NAME", "TOKEN", "TOKEN_FILE"))
"""Variables of the SDK's commands, which a test compares with theirs: nothing of those is imported here."""
_OF_A_SERVICE: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""How the variables end that Kubernetes makes for a Service, with its name before that."""
_NEGATIVE: Final = re.compile(r"-[0-9.]")
"""How values begin that would be negative numbers, with a unit or without."""


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The configuration from a command line (without the program's name) and an environment.

    Raises UsageError, and its subclass ConfigError; `--help` and `--version` print and raise SystemExit.
    """
    parser = _parser()
    parsed, unknown = parser.parse_known_args(_joined(argv))
    if unknown:
        meant = "".join(f"; {each} is no flag: {right} is" for each, right in misspelled_flags(unknown))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    flags = vars(parsed)
    values: dict[str, Any] = {}
    given: dict[str, Source] = {}
    for item in settings():
        source: Source
        if flags[item.name] is not None:
            text, spelled, source = flags[item.name], flag(item.name), "flag"
        elif variable(item.name) in environ:
            text, spelled, source = environ[variable(item.name)], variable(item.name), "environment"
        else:
            continue
        kind = kind_of(item)
        try:
            values[item.name] = kind.parse(text)
        except ValueError:
            raise ConfigError(spelled, kind.expected, text) from None
        if not kind.valid(values[item.name]):
            raise ConfigError(spelled, kind.expected, text)
        given[item.name] = source
    return Config(**values, _given=given)


def log_format(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """How to say what is wrong with the rest of a command line and an environment: the configured `log_format`, or the
    default if that is wrong itself.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag("log_format"), nargs="?")
    given = parser.parse_known_args(list(argv))[0].log_format
    text: str = environ.get(variable("log_format"), "") if given is None else given
    (setting,) = (item for item in settings() if item.name == "log_format")
    return text if kind_of(setting).valid(text) else str(setting.default)


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.upper()


def misspelled(environment: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Variables that look like misspelled settings, each with the right name.

    Only close matches, for a variable with this prefix may be anybody's. Those of the SDK's commands and those that
    Kubernetes makes for Services are none, however close.
    """
    known = {item.name.upper() for item in settings()}
    for name in sorted(environment):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest == name or rest in known or rest in _OF_THE_SDK or _OF_A_SERVICE.search(name):
            continue
        for meant in difflib.get_close_matches(rest, known, n=1, cutoff=_CLOSE):
            yield name, ENVIRONMENT_PREFIX + meant


def misspelled_flags(arguments: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Arguments that look like misspelled flags, each without its value and with the right flag."""
    known = [item.name for item in settings()]
    for wrong in (argument.partition("=")[0] for argument in arguments if argument.startswith("-")):
        name = wrong.lstrip("-").replace("-", "_").lower()
        for meant in difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE):
            yield wrong, flag(meant)


def _joined(argv: Iterable[str]) -> list[str]:
    """A command line in which flags are joined to values that look like negative numbers, as in `--max-wait=-1s`.
    argparse takes what begins with a dash for a flag, unless all of it is a number: it would say that the value is
    missing.
    """
    flags = {flag(item.name) for item in settings()}
    words: list[str] = []
    for word in argv:
        if words and words[-1] in flags and _NEGATIVE.match(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, as for every other configuration error, without the usage.
        raise UsageError(f"{message} (--help lists the flags)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="attnserve-server",
        usage="%(prog)s [--FLAG VALUE ...] | token NAME | layers check FILE",
        description="Serves attention over gRPC. Two commands start no server: `token` makes a bearer token for a "
        "caller, `layers check` shows what a file of layers would load.",
        epilog=f"Each flag --name can also be set as the environment variable {ENVIRONMENT_PREFIX}NAME; the flag "
        f"takes precedence. Exit status: 0 if told to stop, {CANNOT_START} if it cannot start, {WRONG_SETTING} for an "
        f"invalid setting, {CUT_OFF} if work was cut off, {DEVICE_FAILED} if the device failed.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"attnserve {__version__}")
    for item in settings():
        default = shown_default(item)
        text = f"{item.metadata['help']} Default: {default}" if default else item.metadata["help"]
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if kind_of(item) is kinds.TRUTH else {}
        parser.add_argument(flag(item.name), dest=item.name, metavar="VALUE", help=text.replace("%", "%%"), **alone)
    return parser
