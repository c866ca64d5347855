"""How a stream of grpc.aio ended: with the status that its peer gave, where a write failed because it ended, too.

In: the call, before anything is written; the error that reading ended with. Out: the status.

Such a write replaces the peer's status by one of its own, INTERNAL, which is what the error then says
(https://github.com/grpc/grpc/issues/36066). Whoever has asked to be called when the call is done sees it before.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
from google.rpc.status_pb2 import Status

from attnserve._errors import status_from_rpc_error

T = TypeVar("T")


class Said(grpc.RpcError):
    """The status that a call has, as gRPC's errors tell of it."""

    def __init__(self, rpc: Any) -> None:
        """`rpc` is done."""
        super().__init__()
        self._code: grpc.StatusCode = _known(rpc.code())
        self._details: str = _known(rpc.details())
        self._metadata: Any = _known(rpc.trailing_metadata())

    def code(self) -> grpc.StatusCode:
        """Its code."""
        return self._code

    def details(self) -> str:
        """Its message."""
        return self._details

    def trailing_metadata(self) -> Any:
        """What came with it."""
        return self._metadata


class Ending:
    """The first status of one call."""

    def __init__(self, rpc: Any) -> None:
        """`rpc` is a call of grpc.aio."""
        self._said: Said | None = None
        rpc.add_done_callback(self._note)

    def status(self, error: grpc.RpcError) -> Status:
        """The status that the call ended with, where reading ended with this error."""
        return status_from_rpc_error(error if self._said is None else self._said)

    def _note(self, rpc: Any) -> None:
        if self._said is None:
            self._said = Said(rpc)


def _known(value: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that has nothing to wait for."""
    try:
        value.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    value.close()
    raise RuntimeError("the call is done, and waits for its status")
