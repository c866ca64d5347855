"""A unary call beside the operations of a stream: small messages carried by stock protobuf, but for tensors in them.

In: a request and the way to read its response. Out: `Rpc`, which both clients send in the same way, each with its
`Ask` or `AskLater`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from attnserve._errors import ProtocolError
from attnserve._fields import Buffer

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
    fields: Sequence[Buffer] = ()
    """Serialised fields that follow those of the request, in pieces: its tensors."""
    repeatable: bool = True
    """Whether it may be sent again when it is not known whether the server has taken it."""

    @property
    def pieces(self) -> list[Buffer]:
        """The pieces that, concatenated, are the serialised request."""
        return [self.request.SerializeToString(), *self.fields]

    def decode(self, data: bytes) -> T:
        """What the caller is given for a serialised response. ProtocolError if the bytes are none."""
        try:
            response = self.response_type.FromString(data)
        except DecodeError as error:
            name = self.response_type.DESCRIPTOR.name
            raise ProtocolError(f"the server sent what is not a {name}: {error}") from error
        return self.read(response)


class Ask(Protocol):
    """Sends an Rpc, to the server `home` if not to any, and waits for its answer, at most so many seconds."""

    def __call__(self, rpc: Rpc[Any, T], timeout: float | None, /, home: str | None = None) -> T:
        """The answer."""


class AskLater(Protocol):
    """Sends an Rpc; its answer is to be awaited."""

    def __call__(self, rpc: Rpc[Any, T], timeout: float | None, /, home: str | None = None) -> Awaitable[T]:
        """The answer, to come."""
