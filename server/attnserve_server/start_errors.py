"""Why a server does not start: each error is one line for whoever started it, and the exit status of the process."""

from __future__ import annotations

from importlib.util import find_spec

from attnserve_server.exit_statuses import CANNOT_START, WRONG_SETTING


class StartError(Exception):
    """The server cannot start. The message is one line for whoever started it."""

    exit_status = CANNOT_START


def require(*modules: str) -> None:
    """Raises StartError if any of these modules, all of which come with the server, is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise StartError(f"{module} is not installed: pip install 'attnserve[server]'")


class UsageError(StartError):
    """The command line is invalid."""

    exit_status = WRONG_SETTING


class ConfigError(UsageError):
    """A setting has a value that it cannot have."""

    def __init__(self, name: str, expected: str, found: object) -> None:
        super().__init__(f"{name}: expected {expected}, found {found!r}")
        self.name, self.expected, self.found = name, expected, found


class ListenError(StartError):
    """An address cannot be listened on, most often because another process has it."""

    def __init__(self, name: str, address: str, reason: str) -> None:
        super().__init__(f"{name}: cannot listen on {address}: {reason}")
        self.name, self.address, self.reason = name, address, reason
