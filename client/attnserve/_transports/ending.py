"""The status with which a grpc.aio stream ended: the peer's, even if a write failed because the stream had ended.

In: the call, before anything is written; the error that reading ended with. Out: the status.

A write to a stream that has ended replaces the peer's status with INTERNAL, which the error from reading then reports
(https://github.com/grpc/grpc/issues/36066). A done callback of the call runs before, and sees the peer's status.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
from google.rpc.status_pb2 import Status

from attnserve._errors import status_from_rpc_error

T = TypeVar("T")


class Said(grpc.RpcError):
    """The status of a call, with the interface of gRPC's errors."""

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
        """Its trailing metadata."""
        return self._metadata


class Ending:
    """Records the first status of one call."""

    def __init__(self, rpc: Any) -> None:
        """`rpc` is a call of grpc.aio."""
        self._said: Said | None = None
        rpc.add_done_callback(self._note)

    def status(self, error: grpc.RpcError) -> Status:
        """The status that the call ended with, given the error that reading ended with."""
        return status_from_rpc_error(error if self._said is None else self._said)

    def _note(self, rpc: Any) -> None:
        if self._said is None:
            self._said = Said(rpc)


def _known(value: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not need to wait."""
    try:
        value.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    value.close()
    raise RuntimeError("the call is done, and waits for its status")
