"""Every RPC of a live server under random and mutated bytes.

In: a channel to a server that has the layers of `checkpoints`. Out: the number of inputs sent, and the status codes;
`Finding` if a reply is INTERNAL, missing, or contains what it must not. State changed by inputs (caches created, layers
unloaded) is restored after each round.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import calls
import grpc
import messages
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from mutation import is_message, mutated, random_bytes
from sound import DECODER_CACHE, HK, METHODS, PLAIN_CACHE, Caches, D, S, requests, tensor

from attnserve import _fields
from attnserve.v1 import attention_pb2 as pb

PATIENCE_S: Final = 120.0
IN_FLIGHT: Final = 32
CALLS: Final = 64
ROUND: Final = 2000
POOL: Final = 64
"""Mutations of each RPC's requests that are kept to be mutated further."""

FLAGS: Final = (
    "--device", "cpu", "--cache-bytes", "16MiB", "--cache-page-bytes", "4KiB", "--max-caches", "64",
    "--log-level", "error",
)  # fmt: skip
"""Flags for a server that cannot be filled up by what inputs leave behind."""

MAY_BE: Final = {
    grpc.StatusCode[name]
    for name in (
        "OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
        "CANCELLED",
    )
}  # fmt: skip
NAMES: Final = {code.value[0]: code for code in grpc.StatusCode}

WAYS: Final = {"unary": 0.3, "calls": 0.6, "messages": 0.1}
"""How inputs are sent, and the probability of each way."""
RARE: Final = {"LayerService/Load": 0.02, "LayerService/Unload": 0.1}
"""The share of inputs that is sent to these RPCs: they are slow, or spoil the state for later inputs."""

FORBIDDEN: Final = re.compile(
    rb"Traceback|File \"|\.py\b|site-packages|<frozen|object at 0x|/(?:home|root|usr|tmp|var|proc|work|opt)/|"
    rb"Exception|Unexpected <|torch\.|SECRET-FINGERPRINT"
)
"""What no reply may contain: tracebacks, paths, names of the server's own classes, and another caller's data."""
SECRET: Final = b"SECRET-FINGERPRINT--"


class Finding(AssertionError):
    """A fault of the server, and the input that caused it."""

    def __init__(self, what: str, method: str, data: bytes) -> None:
        super().__init__(f"{what}\n{method}\n{data.hex()}")
        self.method, self.data = method, data


@dataclass
class Attack:
    """A caller that sends bad inputs."""

    channel: grpc.Channel
    random: Random
    codes: Counter[str] = field(default_factory=Counter)
    """How often each RPC ended with each code."""
    sent: Counter[str] = field(default_factory=Counter)
    """Inputs sent in each way."""

    def __post_init__(self) -> None:
        self._caches = Caches("", "")
        self._pool: dict[str, list[bytes]] = {}
        self._kinds: dict[str, int] = {}
        self._flight: deque[tuple[str, bytes, Any]] = deque()

    def run(self, inputs: int) -> None:
        """Sends at least `inputs` inputs. Raises Finding."""
        while inputs > 0:
            self.prepare()
            begin = inputs
            for way in WAYS:  # each at least once, whatever the random choice
                inputs -= self._some(way)
            while inputs > 0 and begin - inputs < ROUND:
                inputs -= self._some(self.random.choices(list(WAYS), list(WAYS.values()))[0])
            while self._flight:
                self._settle()

    def send(self, method: str, data: bytes) -> None:
        """Sends one input and waits for its outcome. Raises Finding."""
        if METHODS[method].streaming:
            self._send_messages(data, wait=True)
        else:
            self._send(method, data)
            self._settle()

    def input(self, method: str) -> bytes:
        """A random input."""
        if not self._pool:
            self.prepare()
        return self._input(method)

    def seeds(self, method: str) -> list[bytes]:
        """The sound requests of an RPC."""
        return self._pool[method][: self._kinds[method]]

    def prepare(self) -> None:
        """Restores the caches and layers that the sound requests need."""
        caches = [cache.name for cache in self._ask("CacheService/List").caches]
        self._ask("CacheService/Delete", names=[*caches, "nothing"])
        if len(self._ask("LayerService/List").layers) < 10:
            self._ask("LayerService/Load", definitions="layers.toml")
        plain, decoder, others = (
            self._ask("CacheService/Create", **shape).cache.name for shape in (PLAIN_CACHE, DECODER_CACHE, PLAIN_CACHE)
        )
        self._caches = Caches(plain, decoder)
        self._ask("CacheService/Append", name=plain, key=tensor(HK, S, D), value=tensor(HK, S, D))
        # Another caller's data, which the attacker must not see.
        secret = messages.tensor(np.frombuffer(SECRET * HK * D, np.float32).reshape(HK, -1, D))
        self._ask("CacheService/Append", name=others, key=secret, value=secret)
        self._pool = {
            name: [message.SerializeToString() for message in kinds.values()]
            for name, kinds in requests(self._caches).items()
        }
        self._kinds = {name: len(kinds) for name, kinds in self._pool.items()}

    def _ask(self, method: str, **fields: Any) -> Any:
        return ask(self.channel, method, **fields)

    def _input(self, method: str) -> bytes:
        if self.random.random() < 0.03:
            return random_bytes(self.random)
        pool = self._pool[method]
        begin = self.random.choice(pool[: self._kinds[method]] if self.random.random() < 0.6 else pool)
        data = mutated(self.random, METHODS[method].request, begin, self.random.choice(pool))
        if is_message(METHODS[method].request, data):  # invalid messages lead nowhere
            kinds = self._kinds[method]
            if len(pool) < kinds + POOL:
                pool.append(data)
            else:
                pool[self.random.randrange(kinds, len(pool))] = data
        return data

    def _some(self, way: str) -> int:
        """Sends some inputs in one way; returns how many."""
        if way == "calls":
            return self._send_calls()
        if way == "messages":
            data = self._input("AttentionService/AttendStream")
            self._send_messages(data, wait=self.random.random() < 0.9)
            return 1
        before = sum(self.sent.values())
        for _ in range(CALLS):
            method = self.random.choice([name for name in METHODS if not METHODS[name].streaming])
            if self.random.random() < RARE.get(method, 1.0):
                self._send(method, self._input(method))
        return sum(self.sent.values()) - before

    def _send(self, method: str, data: bytes) -> None:
        if len(self._flight) >= IN_FLIGHT:
            self._settle()
        call = self.channel.unary_unary(METHODS[method].path).future(data, timeout=PATIENCE_S)
        self._flight.append((method, data, call))
        self.sent[method] += 1

    def _settle(self) -> None:
        method, data, call = self._flight.popleft()
        try:
            reply = call.result()
        except grpc.RpcError:
            self._judge(method, data, call.code(), calls.status_of(call), call.details())
            return
        self._judge(method, data, grpc.StatusCode.OK, None, "")
        self._parse(method, data, METHODS[method].response, reply)

    def _send_calls(self) -> int:
        """Sound calls with mutated requests: each gets one reply, and the stream ends normally."""
        sent: dict[int, tuple[str, bytes]] = {}
        pieces = []
        for call_id in range(CALLS):
            operation = self.random.choice(("attend", "apply"))
            data = self._input(f"AttentionService/{operation.capitalize()}")
            sent[call_id] = operation, data
            number = pb.AttendStreamCall.DESCRIPTOR.fields_by_name[operation].number
            call = pb.AttendStreamCall(id=call_id).SerializeToString() + _field(number, data)
            pieces.append(_field(pb.AttendStreamRequest.CALLS_FIELD_NUMBER, call))
            self.sent[f"stream/{operation}"] += 1
        whole = b"".join(pieces)
        for reply in self._replies([whole]):
            if reply.id not in sent:
                raise Finding(f"a reply to {reply.id}, which is no call or has had its reply", "AttendStream", whole)
            operation, data = sent.pop(reply.id)
            code = NAMES[reply.error.code]
            self._judge(f"AttentionService/{operation.capitalize()}", data, code, reply.error, reply.error.message)
        if sent:
            raise Finding(f"no reply to {sorted(sent)}", "AttendStream", whole)
        return CALLS

    def _send_messages(self, data: bytes, wait: bool) -> None:
        """Possible messages of a stream, which ends normally or with an error; or the caller does not wait."""
        method = "AttentionService/AttendStream"
        self.sent[method] += 1
        call = self.channel.stream_stream(METHODS[method].path)(iter([data]), timeout=PATIENCE_S)
        try:
            if not wait:
                call.cancel()
            for reply in call:
                for each in self._parse(method, data, pb.AttendStreamResponse, reply).replies:
                    self._judge(method, data, NAMES[each.error.code], each.error, each.error.message)
        except grpc.RpcError:
            if wait:
                self._judge(method, data, call.code(), calls.status_of(call), call.details())

    def _replies(self, messages: list[bytes]) -> Iterator[pb.AttendStreamReply]:
        method = "AttentionService/AttendStream"
        call = self.channel.stream_stream(METHODS[method].path)(iter(messages), timeout=PATIENCE_S)
        try:
            for message in call:
                yield from self._parse(method, messages[0], pb.AttendStreamResponse, message).replies
        except grpc.RpcError as error:
            raise Finding(f"the stream failed: {call.code()} {call.details()}", method, messages[0]) from error

    def _judge(
        self, method: str, data: bytes, code: grpc.StatusCode, status: status_pb2.Status | None, details: str
    ) -> None:
        self.codes[f"{method} {code.name}"] += 1
        if code not in MAY_BE:
            raise Finding(f"{code.name}: {details}", method, data)
        if status is None:
            return
        if code is not grpc.StatusCode.OK and not status.details:
            raise Finding(f"{code.name} without details: {details}", method, data)
        said = status.SerializeToString() + details.encode()
        if (found := FORBIDDEN.search(said)) and found.group() not in data:
            raise Finding(f"it says {found.group()!r}: {details}", method, data)

    def _parse(self, method: str, data: bytes, message_type: type[Message], reply: bytes) -> Any:
        if SECRET in reply:
            raise Finding("it says what another caller has", method, data)
        try:
            return message_type.FromString(reply)
        except DecodeError as error:
            raise Finding(f"the reply is no {message_type.__name__}: {error}", method, data) from None


def ask(channel: grpc.Channel, method: str, **fields: Any) -> Any:
    """The reply to a sound request."""
    request = METHODS[method].request(**fields).SerializeToString()
    return METHODS[method].response.FromString(channel.unary_unary(METHODS[method].path)(request, timeout=PATIENCE_S))


def _field(number: int, content: bytes) -> bytes:
    return _fields.field_prefix(number, len(content)) + content
