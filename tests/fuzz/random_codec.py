"""The wire codec on random and mutated bytes, each result compared with stock protobuf's."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

from codec import assert_same_meaning
from google.protobuf.message import Message
from mutation import is_message, mutated, random_bytes
from sound import METHODS, Caches, requests

SEEDS: Final[list[tuple[type[Message], bytes]]] = [
    (METHODS[name].request, message.SerializeToString())
    for name, kinds in requests(Caches("x" * 24, "y" * 24)).items()
    for message in kinds.values()
]
"""A message of each kind that a server receives."""
MESSAGE_TYPES: Final = sorted(
    {kind for method in METHODS.values() for kind in (method.request, method.response)}, key=lambda kind: kind.__name__
)
SHORT: Final = 4096
POOL: Final = 512
"""Inputs accepted by protobuf that are kept to be mutated further."""


class Inputs:
    """Inputs: a few purely random, most of them mutations of messages or of earlier mutations."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._pool = list(SEEDS)

    def take(self, count: int) -> Iterator[tuple[type[Message], bytes]]:
        """The next `count` inputs, each a message type and bytes."""
        for _ in range(count):
            yield self._next()

    def _next(self) -> tuple[type[Message], bytes]:
        random, pool = self._random, self._pool
        if random.random() < 0.05:
            return random.choice(MESSAGE_TYPES), random_bytes(random)
        message_type, data = random.choice(pool)
        data = mutated(random, message_type, data, random.choice(pool)[1])
        # Mutating invalid messages leads nowhere, and long ones are slow.
        if len(data) <= SHORT and is_message(message_type, data):
            if len(pool) < len(SEEDS) + POOL:
                pool.append((message_type, data))
            else:
                pool[random.randrange(len(SEEDS), len(pool))] = message_type, data
        return message_type, data


def check(message_type: type[Message], data: bytes) -> None:
    """Raises if the codec gets the input wrong."""
    assert_same_meaning(message_type, data)
