"""`python racing.py LIBRARY ROUNDS`: several callers of one team at once, with calls, products, layers and passages.

In: the path of a library, and the number of rounds. Out: `sound` if all results match the oracle's. With a library
built with the sanitizer for threads, also that no two threads touched the same memory in no certain order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Barrier

from binding import Call, Outcome, _Packed, assert_right, room
from random_calls import random_call, sharing
from random_multi_heads import random_multi_head
from random_passages import random_passage
from random_products import random_product

from attnserve_server.native import library
from attnserve_server.native.multi_head import MultiHeads
from attnserve_server.native.passages import Passages
from attnserve_server.native.products import Products

CALLERS, HELPERS = 3, 3
MANY_KEYS = (2047, 2049, 4500)
"""Enough to be divided into ranges, if there are few queries."""

Task = Callable[[library.Threads], None]
"""Computes something with these threads, and checks the results."""


def attention(kernel: library.Library, calls: list[Call], expect_right: bool) -> Task:
    packed = [_Packed(call, room) for call in calls]

    def compute(threads: library.Threads) -> None:
        not_finite = kernel.attend(bytearray().join(each.bytes for each in packed), threads)
        outcomes: list[Outcome] = [each.outcome(place not in not_finite) for place, each in enumerate(packed)]
        for call, outcome in zip(calls, outcomes, strict=True):
            if expect_right:
                assert_right(call, outcome)

    return compute


def tasks(random: Random, instructions: str) -> list[Task]:
    """One of each kind."""
    kernel, layers = library.Library(instructions), MultiHeads(instructions)
    product, layer = random_product(random, (30, 130)), random_multi_head(random)
    few, many = random_passage(random, (1, 7, 30)), random_passage(random, (130,))
    return [
        attention(kernel, [random_call(random) for _ in range(3)], expect_right=True),
        attention(kernel, [random_call(random, (1, 2, 5), MANY_KEYS) for _ in range(2)], expect_right=True),
        attention(kernel, sharing(random, 12, 16), expect_right=False),  # some have NaN
        lambda threads: product.assert_right(
            Products(instructions, lambda flops: threads).multiply(product.weight, product.rows)
        ),
        lambda threads: layer.assert_right(layer.outcome(layers, threads)),
        lambda threads: few.assert_right(few.outcome(Passages(instructions, lambda effort: threads))),
        lambda threads: many.assert_right(many.outcome(Passages(instructions, lambda effort: threads))),
    ]


def main() -> None:
    """Raises, or the process is killed, if anything is wrong."""
    library.PATH = Path(sys.argv[1])  # type: ignore[misc]
    library._found.cache_clear()
    patient, impatient = library.Team(HELPERS, patient=True), library.Team(HELPERS)
    assert len(patient) == len(impatient) == HELPERS
    with ThreadPoolExecutor(CALLERS) as callers:
        for number in range(int(sys.argv[2])):
            random = Random(number)
            instructions = random.choice(library.available())
            threads = library.Threads(random.choice((patient, impatient)), random.randint(1, HELPERS))
            begin = Barrier(CALLERS)

            def compute(own: list[Task], threads: library.Threads = threads, begin: Barrier = begin) -> None:
                begin.wait()  # with another caller at work in the team, one computes alone
                for task in own:
                    task(threads)

            work = [tasks(random, instructions) for _ in range(CALLERS)]
            for each in work:
                random.shuffle(each)
            list(callers.map(compute, work))
    for team in (patient, impatient):
        team.close()
    print("sound")


if __name__ == "__main__":
    main()
