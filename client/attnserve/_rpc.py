"""A unary call beside the operations: small messages, asked seldom, carried by stock protobuf.

In: a request and the way to read its response. Out: `Rpc`, which both clients send in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from attnserve._errors import ProtocolError

ResponseT = TypeVar("ResponseT", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rpc(Generic[ResponseT, T]):
    """A method, what it is asked, and what is made of the answer."""

    path: str
    """The method, with its service."""
    request: Message
    response_type: type[ResponseT]
    read: Callable[[ResponseT], T]
    """What the caller is given for a response."""
    repeatable: bool = True
    """Whether it may be sent again when it is not known whether the server has taken it."""

    def decode(self, data: bytes) -> T:
        """What the caller is given for a serialised response. ProtocolError if the bytes are none."""
        try:
            response = self.response_type.FromString(data)
        except DecodeError as error:
            name = self.response_type.DESCRIPTOR.name
            raise ProtocolError(f"the server sent what is not a {name}: {error}") from error
        return self.read(response)
