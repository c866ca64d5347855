"""The wire codec under random and mutated bytes, each compared with what stock protobuf makes of it."""

from __future__ import annotations

from random import Random
from typing import Final

from codec import assert_same_meaning
from google.protobuf.message import Message
from mutation import mutated, random_bytes
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
POOL: Final = 512
"""So many inputs that protobuf accepted are mutated further."""


def inputs(random: Random, count: int) -> list[tuple[type[Message], bytes]]:
    """Inputs, few of them purely random, most mutations of messages and of such mutations."""
    pool, made = list(SEEDS), []
    for _ in range(count):
        if random.random() < 0.05:
            made.append((random.choice(MESSAGE_TYPES), random_bytes(random)))
            continue
        message_type, data = random.choice(pool)
        data = mutated(random, message_type, data, random.choice(pool)[1])
        made.append((message_type, data))
        if len(pool) < POOL:
            pool.append(made[-1])
        elif random.random() < 0.1:
            pool[random.randrange(len(SEEDS), POOL)] = made[-1]
    return made


def check(message_type: type[Message], data: bytes) -> None:
    """Raises whatever the codec does wrong."""
    assert_same_meaning(message_type, data)
