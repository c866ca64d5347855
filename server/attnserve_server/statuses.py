"""Errors as they travel: google.rpc.Status with its details."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "attnserve"
"""The domain of every ErrorInfo."""


def error_info(reason: str, metadata: Mapping[str, str]) -> error_details_pb2.ErrorInfo:
    """The detail that programs go by."""
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def status_of(code: grpc.StatusCode, message: str, details: Iterable[Message]) -> status_pb2.Status:
    """A status with these details."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status
