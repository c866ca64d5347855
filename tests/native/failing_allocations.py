"""`python failing_allocations.py LIBRARY COUNT`: all that the library computes, while its allocations fail.

In: the path of a library built with `allocations.c`, and the number of random examples of each kind. Each allocation
fails in turn, by itself and with all that follow. Out: `sound` if what lacked memory raises MemoryError, all else is
right, and nothing is ever kept. A thread without memory may leave its share of the work to those that have some.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from itertools import count
from itertools import product as product_of
from pathlib import Path
from random import Random

import numpy as np
import random_layers as make
from binding import Call, assert_right, attend
from bits import assert_same_bits
from decoding import Decoding, Part, decoder
from random_calls import normal, sharing
from random_multi_heads import random_multi_head
from random_passages import random_passage
from random_products import random_product

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library
from attnserve_server.native.multi_head import MultiHeads
from attnserve_server.native.passages import Passages
from attnserve_server.native.products import Products

HELPERS = 2
ALL = 2**62
"""Allocations: more than there ever are."""

Task = Callable[[library.Threads], None]
"""Computes something with these threads, and asserts that it is right."""


def attention(kernel: library.Library, random: Random) -> Task:
    """Of calls that share pages, and of others, with and without ranges of keys."""
    numbers = np.random.default_rng(random.getrandbits(32))
    query, key, value = (normal(numbers, (2, length, 16)) for length in (2, 2100, 2100))
    calls = [Call(query, key, value), Call(key[:, :200], key[:, :50], value[:, :50]), Call(query, key, value)]
    calls += sharing(random, 3, 64)
    alone = [attend(kernel, [call])[0] for call in calls]

    def compute(threads: library.Threads) -> None:
        outcomes = attend(kernel, calls, 1 + threads.helpers)
        for call, outcome, expected in zip(calls[:3], outcomes, alone, strict=False):
            assert_right(call, outcome)
            assert_same_bits(outcome.output, expected.output)
        assert [outcome.finite for outcome in outcomes] == [outcome.finite for outcome in alone]

    return compute


def product(instructions: str, random: Random) -> Task:
    made = random_product(random, (1, 9, 70))
    return lambda threads: made.assert_right(
        Products(instructions, lambda flops: threads).multiply(made.weight, made.rows)
    )


def passage(instructions: str, random: Random) -> Task:
    made = random_passage(random, (1, 9, 130))
    return lambda threads: made.assert_right(made.outcome(Passages(instructions, lambda effort: threads)))


def layer(instructions: str, random: Random) -> Task:
    made = random_multi_head(random)
    return lambda threads: made.assert_right(made.outcome(MultiHeads(instructions), threads))


def steps(kernel: library.Library, random: Random) -> Task:
    """Of a decoder, with new caches each time."""
    device = CpuDevice(1, 0, kernel)
    decoding, rows = Decoding(device, decoder(), "float32"), make.random_rows(3, 32, random.randrange(100), "float32")
    (expected,) = decoding.run([Part(decoding.create(), rows)])

    def compute(threads: library.Threads) -> None:
        device._threads_for = lambda flops: threads  # type: ignore[method-assign]
        (found,) = decoding.run([Part(decoding.create(), rows)])
        assert_same_bits(found.numpy(), expected.numpy())
        assert decoding.stepped[-1][1]

    return compute


def main() -> None:
    """Raises if anything is wrong."""
    library.PATH = Path(sys.argv[1])  # type: ignore[misc]
    library._found.cache_clear()
    built = ctypes.CDLL(sys.argv[1])
    names = ("alive", "left", "failing")
    alive, left, failing = (ctypes.c_int64.in_dll(built, f"allocations_{name}") for name in names)
    team = library.Team(HELPERS, patient=True)
    for instructions in library.available():
        kernel = library.Library(instructions)
        for seed in range(int(sys.argv[2])):
            random = Random(seed)
            tasks = [
                attention(kernel, random),
                product(instructions, random),
                passage(instructions, random),
                layer(instructions, random),
                steps(kernel, random),
            ]
            for task, fail, helpers in product_of(tasks, (1, ALL), (0, HELPERS)):
                threads = library.Threads(team if helpers else None, helpers)
                for number in count():
                    left.value, failing.value = number, fail
                    try:
                        task(threads)
                        refused = False
                    except MemoryError:
                        refused = True
                    lacked, left.value = left.value < 0, ALL
                    # One that computes alone has nobody to leave work to.
                    assert refused == lacked or (lacked and helpers), (task, fail, helpers, number)
                    assert not alive.value, f"{alive.value} allocations are kept: {task} with {helpers} helpers"
                    if not lacked:
                        break
                assert number
    team.close()
    print("sound")


if __name__ == "__main__":
    main()
