"""Unary calls other than a stream's operations: small messages encoded by stock protobuf, except for their tensors.

In: a request and how to read its response. Out: `Rpc`, which both clients send in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from attnserve._errors import ProtocolError
from attnserve._fields import Buffer

ResponseT = TypeVar("ResponseT", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rpc(Generic[ResponseT, T]):
    """A method, its request, and how its response is read."""

    path: str
    """The method, with its service."""
    request: Message
    response_type: type[ResponseT]
    read: Callable[[ResponseT], T]
    """Makes the caller's result from a response."""
    fields: Sequence[Buffer] = ()
    """Pieces of serialised fields that follow those of the request: its tensors."""
    repeatable: bool = True
    """Whether it may be sent again if it is unknown whether the server has run it."""
    anyhow: bool = False
    """Whether it is about the server itself, and is sent to one that starts or drains, too."""

    @property
    def pieces(self) -> list[Buffer]:
        """The pieces that, concatenated, are the serialised request."""
        return [self.request.SerializeToString(), *self.fields]

    def decode(self, data: bytes) -> T:
        """The caller's result from a serialised response. ProtocolError if the bytes are not one."""
        try:
            response = self.response_type.FromString(data)
        except DecodeError as error:
            name = self.response_type.DESCRIPTOR.name
            raise ProtocolError(f"the server sent what is not a {name}: {error}") from error
        return self.read(response)
